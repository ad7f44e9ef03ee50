"""The Modelfile: its template writes what the model's chat template writes, or there is none."""

import json
import re
from collections.abc import Iterator

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from tests.conftest import NANO, ROOT, refuses
from trainer.config.resolve import resolve
from trainer.errors import ModelError
from trainer.export import ollama
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.records import Problem

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


QWEN3 = (  # as it is, but for tools: a thought that is switched off is written before the answer that is asked for
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
SMOLLM3 = (  # it also writes one before earlier answers, and a system message of its own around that of the run
    "{{ '<|im_start|>system\nMode: /no_think\n\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% else %}{{ 'Be helpful.' }}{% endif %}"
    "{{ '<|im_end|>\n' }}{% for m in messages if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' + "
    "('<think>\n\n</think>\n' if m['role'] == 'assistant' else '') + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% endif %}"
)
NO_THOUGHT = "prompt.template={enable_thinking: false}"


@pytest.fixture
def own():
    return AutoTokenizer.from_pretrained(NANO)


def modelfile(tokenizer, *overrides, context=2**15, stops=()) -> str:
    config = resolve("nano", None, overrides)
    return ollama.modelfile("it.gguf", config, prompter(tokenizer, *overrides), stops, context)


def prompter(tokenizer, *overrides) -> Prompter:
    config = resolve("nano", None, overrides)
    return Prompter(tokenizer, config.prompt, make_task(config.task))


def test_the_modelfile_of_the_embedded_model(tokenizer, own):
    text = modelfile(tokenizer, stops=["<|im_end|>", "\nQuestion:"], context=256)
    assert text == (ROOT / "tests/data/Modelfile").read_text()
    own.bos_token = "<|im_start|>"  # as the first token of SmolLM2's vocabulary, which its tokenizer does not add
    assert "{{ range .Messages }}<|im_start|>" in modelfile(own)


ROOM = [(32768, (), "4096"), (2048, ("prompt.max_tokens=6000",), "2048")]
ROOM += [(32768, ("prompt.max_tokens=6000", "rollout.max_new_tokens=1000"), "7000")]


@pytest.mark.parametrize(("context", "overrides", "written"), ROOM)
def test_a_conversation_has_room(context, overrides, written, own):
    text = modelfile(own, *overrides, context=context)
    assert f"PARAMETER num_ctx {written}\n" in text
    assert "num_predict" not in text


def go(template: str, messages: list[dict[str, str]], prompt: str) -> str:
    """Execute the part of Go's templates that is written here."""
    condition = r'\{\{ if eq \.Role "(\w+)" \}\}(.*?)(?:\{\{ else \}\}(.*?))?\{\{ end \}\}'
    before, found, after = re.fullmatch(
        r"(.*?)(?:\{\{ range \.Messages \}\}(.*)\{\{ end \}\})?(.*?)", template, re.S
    ).groups()

    def turn(role: str, content: str) -> str:
        text = re.sub(ESCAPED, lambda braces: "\0" * len(braces[1]), found)
        text = re.sub(condition, lambda part: part[2] if part[1] == role else part[3] or "", text, flags=re.DOTALL)
        return text.replace("{{ .Role }}", role).replace("{{ .Content }}", content)

    text = "".join(turn(**message) for message in messages) if found else ""
    text = before + text + after.replace("{{ .Prompt }}", prompt)
    return re.sub(ESCAPED, r"\1", text).replace("\0", "{")


ESCAPED = re.compile(r'(?<!\{)\{\{ "(\{+)" \}\}')  # Go takes the first two braces
FORMS = {"chatml": None, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN, "qwen3": QWEN3, "smollm3": SMOLLM3}


@pytest.mark.parametrize("style", ["chat", "gsm8k", "boxed", "few_shot", "r1_zero", "own.txt"])
@pytest.mark.parametrize("form", FORMS)
def test_ollama_asks_as_the_run_did(form, style, own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.txt").write_text("Write {{x}} for {{question}}, {question} {{{question} now")
    own.chat_template = FORMS[form] or own.chat_template
    if form == "gemma":
        own.bos_token = "<|endoftext|>"
    overrides = [f"prompt.style={style}", *([NO_THOUGHT] if form == "qwen3" else [])]
    said = read(modelfile(own, *overrides))
    turns = [{"role": "system", "content": said["SYSTEM"]}] if "SYSTEM" in said else []
    turns += [{"role": role, "content": content} for role, content in said.get("MESSAGE", [])]
    asked = go(said["TEMPLATE"], [*turns, {"role": "user", "content": "2 + 2?"}], "2 + 2?")
    assert asked == prompter(own, *overrides).prompt(Problem("", "2 + 2?", "")).text


@pytest.mark.parametrize(("template", "begin"), [(LLAMA3, "<|start_header_id|>"), (GEMMA, "<start_of_turn>")])
def test_other_forms(template, begin, own):
    own.chat_template, own.bos_token = template, "<|endoftext|>"
    first = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    own.backend_tokenizer.post_processor = first  # llama.cpp adds what the tokenizer adds
    text = modelfile(own)
    assert f"{{{{ range .Messages }}}}{begin}" in text
    assert "SYSTEM" not in text


def test_the_system_message_that_a_template_adds_and_that_of_the_run(own):
    own.chat_template = QWEN
    assert 'SYSTEM "You are Qwen."' in modelfile(own)
    assert 'SYSTEM "Be brief."' in modelfile(own, "prompt.system=Be brief.")


@pytest.mark.parametrize("template", [QWEN.replace("\n'", "\n\n'"), QWEN.replace("m['content']", "m['content'] + '!'")])
def test_a_template_that_would_be_guessed_is_refused(template, own):
    own.chat_template = template
    with refuses("--to", ModelError, names="template"):
        modelfile(own)


def read(modelfile: str) -> dict[str, str]:
    """Read commands as Ollama's parser does: a value ends with the first line at which its quotes are closed."""
    found, lines = {}, iter(modelfile.splitlines())
    for line in lines:
        name, _, value = line.partition(" ")
        role, _, content = value.partition(" ") if name == "MESSAGE" else ("", "", value)
        text = unquoted(content, lines)
        if role:
            found.setdefault(name, []).append((role, text))
        else:
            found[name] = text
    return found


def unquoted(value: str, lines: Iterator[str]) -> str:
    while (begun := re.match('"""|"|', value)[0]) and (
        not value.strip().endswith(begun) or len(value.strip()) < 2 * len(begun)
    ):
        value += f"\n{next(lines)}"
    return value.strip()[len(begun) : len(value.strip()) - len(begun)]


@pytest.mark.parametrize("system", ['Say """42""" and', '"', '"""', '"a"\n"b"', ' """ a\n""', "a\n\n b ", '""\n"""'])
def test_quotation_marks_in_a_system_message_are_read_back(system, own):
    assert read(modelfile(own, f"prompt.system={json.dumps(system)}"))["SYSTEM"] == system
    for text in ('"""\nEnd', 'Write\n"""42""" \r\nalone'):  # which would end too early
        with refuses("--to", ModelError, names="prompt.system"):
            modelfile(own, f"prompt.system={json.dumps(text)}")
