"""GGUF files, read by the real llama.cpp: it computes what transformers computes, or the file is refused."""

import json
import math
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.normalizers import Prepend, Replace, Sequence
from tokenizers.pre_tokenizers import Metaspace, Split
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from tests.conftest import octet, refuses
from tests.llama.families import FAMILIES, make
from tests.llama.file_model import Difference, FileModel
from trainer.commands.main import main
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.errors import MergeError
from trainer.export import FORMATS, gguf_file, llama_cpp
from trainer.model import lora, merge
from trainer.model.load import load_model
from trainer.records import Problem, Prompt, Sampling
from trainer.rollout.turns import Stops

pytestmark = pytest.mark.llama
ABOUT = {"name": "demo", "base": "", "licence": None}
TEXTS = (
    "<|im_start|>user\nAnn has 12 cards, finds 24 more.<|im_end|>\n<|im_start|>assistant\n" * 2,
    "  Café 1234 5\n\n",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture
def prompts(tokenizer):
    return [Prompt(Problem(text, text, "1"), text, tuple(tokenizer(text)["input_ids"])) for text in TEXTS]


def weights_of(folder) -> merge.Weights:
    return merge.stored_weights(Model(name=str(folder)), None, None)


def difference(file, weights, names, tokenizer, prompts) -> Difference:
    """Return what the check compares, for 24 tokens behind each prompt."""
    sampler = llama_cpp.LlamaCppSampler(file, Stops(tokenizer, []), 256)
    try:
        assert [tuple(sampler.tokens(one.text, False)) for one in prompts] == [one.tokens for one in prompts]
        answers = [group[0] for _, group in sampler.sample(prompts, Sampling(1, 0.0, 24, 0))]
    finally:
        sampler.close()
    asked = [(prompt.tokens, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return FileModel(file, weights, names).difference(asked)


def test_llama_cpp_computes_what_transformers_computes(family, tokenizer, prompts, tmp_path):
    """In fp32 to four decimals, so no name, order or setting is wrong; in others within a bound that is not wide."""
    weights = weights_of(family)
    for fmt in FORMATS:
        names = gguf_file.write(tmp_path / fmt, weights, tokenizer, fmt, ABOUT)
        apart = difference(tmp_path / fmt, weights, names, tokenizer, prompts)
        assert apart.mean <= apart.bound, fmt
        assert apart.bound < 0.3, fmt
        if fmt == "f32":
            assert apart.largest < 2e-3


WRONG = {
    "angles": {"rope_parameters": {"rope_type": "default", "rope_theta": 9e3}},
    "epsilon": {"rms_norm_eps": 1e-2},
    "groups of heads": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
}


@pytest.mark.parametrize("setting", WRONG)
def test_a_file_with_a_wrong_setting_is_told_apart(setting, tokenizer, prompts, tmp_path):
    weights = weights_of(make("qwen2", tmp_path / "model"))
    right = weights.config
    weights.config = type(right)(**{**right.to_dict(), **WRONG[setting]})
    weights.config.architectures = right.architectures
    names = gguf_file.write(tmp_path / "file", weights, tokenizer, "q8_0", ABOUT)
    weights.config = right
    apart = difference(tmp_path / "file", weights, names, tokenizer, prompts)
    assert apart.mean > apart.bound
    (tmp_path / "file").write_bytes(b"GGUF of another time")
    with refuses(tmp_path / "file", MergeError):
        llama_cpp.LlamaCppSampler(tmp_path / "file", Stops(tokenizer, []), 16)


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """What a run leaves: its settings, and an adapter that changes many answers."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    config = resolve("nano")
    model = lora.add_adapter(load_model(config.model, "fp32", torch.device("cpu")), config.lora)
    torch.manual_seed(0)
    for name, value in lora.trainable(model).items():
        if "lora_B" in name:
            value.normal_(std=0.05)
    lora.save_adapter(model, folder / "adapter")
    (folder / "config.yaml").write_text(config.to_yaml())
    return folder


@pytest.mark.parametrize("fmt", ["f16", "q8_0", "q4_k_m"])
def test_export_answers_alike(fmt, run, tmp_path, capfd):
    assert octet("export", run, "--to", "ollama", "--format", fmt, "--problems", 8, "--out", tmp_path, "--json") == 0
    facts = json.loads(capfd.readouterr().out)
    assert facts["problems"] == 8
    assert math.isfinite(facts["largest_difference"])
    if fmt == "f16":
        assert facts["identical"] == 8
    assert f"FROM ./one-{fmt.upper()}.gguf\n" in (tmp_path / "Modelfile").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Modelfile", "export.json", f"one-{fmt.upper()}.gguf"]
    assert json.loads((tmp_path / "export.json").read_text())["largest_difference"] == facts["largest_difference"]


def test_a_file_that_reads_other_tokens_is_refused(run, tmp_path, capfd):
    """The tokenizer composes accents first, which llama.cpp does not do."""
    lines = [{"question": f"Rene\u0301 has {count} cards.", "answer": str(count)} for count in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, lines)))
    settings = ["task.name=records", f"task.path={tmp_path}/data.jsonl", f"task.test_path={tmp_path}/data.jsonl"]
    assert octet("export", run, "--to", "ollama", "--problems", 4, "--out", tmp_path / "out", *settings) == 1
    assert "reads the prompt of problem" in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one-Q8_0.gguf.refused"]


BROKEN = {
    "add_chat_template": ("{{ 'GARBAGE' }}", "its chat template"),
    "add_eos_token_id": (50, "it names 50 as the end of a text, not"),
    "add_eot_token_id": (50, ", token 50, which is ordinary text"),
}


@pytest.mark.parametrize("field", BROKEN)
def test_export_refuses_a_file_that_was_written_with_a_wrong_template_or_end(field, run, tmp_path, monkeypatch, capfd):
    """The package gguf writes another value than it is given. The answers to the check are right all the same."""
    value, message = BROKEN[field]
    write = getattr(gguf.GGUFWriter, field)
    monkeypatch.setattr(gguf.GGUFWriter, field, lambda writer, _: write(writer, value))
    assert octet("export", run, "--to", "ollama", "--problems", 2, "--out", tmp_path / "out") == 1
    assert message in capfd.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["one-Q8_0.gguf.refused"]


# ---------------------------------------------------------------- SentencePiece

WAYS = {
    "Llama 2": (Sequence([Prepend("▁"), Replace(" ", "▁")]), None),
    "Metaspace": (None, Metaspace("▁", prepend_scheme="always", split=False)),
    "Gemma": (Replace(" ", "▁"), Split(" ", "merged_with_previous")),
}


@pytest.fixture(scope="module", params=WAYS)
def sentencepiece(request) -> PreTrainedTokenizerFast:
    """A vocabulary of 480 tokens, learned from this file."""
    own = Tokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    own.normalizer, splits = WAYS[request.param]
    if splits is not None:
        own.pre_tokenizer = splits
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = Path(__file__).read_text().splitlines()
    own.train_from_iterator(lines, BpeTrainer(vocab_size=480, special_tokens=special, max_token_length=8))
    rules = json.loads(own.to_str())
    rules["added_tokens"] = rules["added_tokens"][:3]  # bytes are ordinary tokens
    own = Tokenizer.from_str(json.dumps(rules))
    own.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=own, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_tokenizers_of_the_sentencepiece_kind(sentencepiece, tmp_path):
    weights = weights_of(make("llama", tmp_path / "model"))
    gguf_file.write(tmp_path / "file", weights, sentencepiece, "q8_0", ABOUT)
    sampler = llama_cpp.LlamaCppSampler(tmp_path / "file", Stops(sentencepiece, []), 16)
    texts = ["return the answers of llama.cpp", " two  spaces ", "é🙂 and\nlines\n", "x</s>y"]
    texts += Path(__file__).read_text().splitlines()
    if sentencepiece.backend_tokenizer.normalizer is None:  # Metaspace adds no space before one, and llama.cpp does
        texts = [text for text in texts if not text.startswith(" ")]
    for text in filter(None, texts):
        assert sampler.tokens(text, True) == sentencepiece(text)["input_ids"], text
    sampler.close()


def test_a_file_whose_check_broke_off_does_not_keep_its_name(run, tmp_path, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llama_cpp.LlamaCppSampler, "sample", stopped)
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        main(["export", str(run), "--to", "ollama", "--out", str(tmp_path / "out"), "--problems", "2"])
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["one-Q8_0.gguf.unchecked"]
