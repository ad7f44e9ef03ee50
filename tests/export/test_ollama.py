"""The Modelfile: its template writes what the model's chat template writes, or there is none."""

import re

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.conftest import NANO, refuses
from trainer.config.command_line import resolve
from trainer.config.settings import Config
from trainer.errors import ModelError
from trainer.export import ollama

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
    "m['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + "
    "m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def own():
    return AutoTokenizer.from_pretrained(NANO)


def test_the_modelfile_of_the_embedded_model(tokenizer, own):
    text = ollama.modelfile("it.gguf", resolve("nano"), tokenizer, ["<|im_end|>", "\nQuestion:"])
    assert text == (
        'FROM ./it.gguf\nTEMPLATE """{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}'
        '<|im_start|>assistant\n"""\nPARAMETER temperature 1\nPARAMETER num_predict 40\nPARAMETER num_ctx 552\n'
        "PARAMETER top_k 0\nPARAMETER top_p 1\n"
        'PARAMETER min_p 0\nPARAMETER repeat_penalty 1\nPARAMETER stop "<|im_end|>"\n'
        'PARAMETER stop """\nQuestion:"""\n'
    )
    own.bos_token = "<|im_start|>"  # as the first token of SmolLM2's vocabulary, which its tokenizer does not add
    assert "{{ range .Messages }}<|im_start|>" in ollama.modelfile("it.gguf", resolve("nano"), own, [])


@pytest.mark.parametrize(("template", "begin"), [(LLAMA3, "<|start_header_id|>"), (GEMMA, "<start_of_turn>")])
def test_other_forms(template, begin, own):
    own.chat_template, own.bos_token = template, "<|endoftext|>"
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    own.backend_tokenizer.post_processor = first  # llama.cpp adds what the tokenizer adds
    text = ollama.modelfile("it.gguf", resolve("nano"), own, [])
    assert f"{{{{ range .Messages }}}}{begin}" in text
    assert "SYSTEM" not in text


def test_the_system_message_that_a_template_adds_and_that_of_the_run(own):
    own.chat_template = QWEN
    assert 'SYSTEM "You are Qwen."' in ollama.modelfile("it.gguf", resolve("nano"), own, [])
    run = resolve("nano", None, ["prompt.system=Be brief."])
    assert 'SYSTEM "Be brief."' in ollama.modelfile("it.gguf", run, own, [])


GUESSED = [None, QWEN.replace("\n'", "\n\n'"), QWEN.replace("m['content']", "m['content'] + '!'")]


@pytest.mark.parametrize("template", GUESSED)
def test_a_template_that_would_be_guessed_is_refused(template, own):
    own.chat_template = template
    with refuses("--to", ModelError, names="template"):
        ollama.modelfile("it.gguf", resolve("nano"), own, [])


def read(modelfile: str) -> dict[str, str]:
    """Read commands as Ollama's parser does: a value ends with the first line at which its quotes are closed."""
    found, lines = {}, iter(modelfile.splitlines())
    for line in lines:
        name, _, value = line.partition(" ")
        while (begun := re.match('"""|"|', value)[0]) and (
            not value.strip().endswith(begun) or len(value.strip()) < 2 * len(begun)
        ):
            value += f"\n{next(lines)}"
        found[name] = value.strip()[len(begun) : len(value.strip()) - len(begun)]
    return found


def with_system(text: str) -> Config:
    config = resolve("nano")
    return config.model_copy(update={"prompt": config.prompt.model_copy(update={"system": text})})


@pytest.mark.parametrize("system", ['Say """42""" and', '"', '"""', '"a"\n"b"', ' """ a\n""', "a\n\n b ", '""\n"""'])
def test_quotation_marks_in_a_system_message_are_read_back(system, own):
    assert read(ollama.modelfile("it.gguf", with_system(system), own, []))["SYSTEM"] == system
    for text in ('"""\nEnd', 'Write\n"""42""" \r\nalone'):  # which would end too early
        with pytest.raises(ModelError, match=r"prompt\.system"):
            ollama.modelfile("it.gguf", with_system(text), own, [])
