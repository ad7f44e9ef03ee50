"""GGUF files without llama.cpp: what is stored, and what is refused. tests/llama has the real llama.cpp read them."""

import sys
from pathlib import Path
from unittest.mock import MagicMock

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.conftest import NANO, ROOT, refuses
from tests.llama.families import FAMILIES, GEMMA4, LLAMA3, QWEN3_5, SHAPE, YARN, make
from tests.llama.file_model import FileModel
from trainer.config.resolve import resolve
from trainer.config.settings import Model
from trainer.errors import MergeError, ModelError
from trainer.export import FORMATS, gguf_file, llama_cpp, vocabulary
from trainer.model import merge
from trainer.rollout.turns import Stops
from trainer.run.export import _may_have_turns

ABOUT = {"name": "demo", "base": "", "licence": None}


@pytest.fixture(scope="module")
def nano() -> merge.Weights:
    return merge.stored_weights(Model(), None, None)


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_number_is_within_half_a_step(fmt, nano, tokenizer, tmp_path):
    names = gguf_file.write(tmp_path / fmt, nano, tokenizer, fmt, ABOUT)
    read = FileModel(tmp_path / fmt, nano, names)
    norms = {name for name in nano if "norm" in name or name.endswith("bias")}
    assert {name for name, kind in read.kinds.items() if kind == gguf_file.Kind.F32} >= norms


def test_a_model_for_which_llama_cpp_has_no_memory_is_an_error(tokenizer, monkeypatch):
    """It then gives no context, with which it would crash."""
    monkeypatch.setitem(sys.modules, "llama_cpp", MagicMock(**{"llama_init_from_model.return_value": None}))
    with refuses("demo.gguf", MergeError, names="memory"):
        llama_cpp.LlamaCppSampler(Path("demo.gguf"), Stops(tokenizer, []), 16)


@pytest.mark.parametrize(("fmt", "fits"), [("f16", False), ("q4_1", False), ("bf16", True), ("q8_0", True)])
def test_a_number_that_a_format_does_not_hold_is_refused_by_name(fmt, fits, tokenizer, tmp_path):
    model, name = AutoModelForCausalLM.from_pretrained(NANO), "model.layers.0.mlp.down_proj.weight"
    model.get_parameter(name).data[0, :2] = torch.tensor([-1e5, 1e6])
    model.save_pretrained(tmp_path / "large")
    weights = merge.stored_weights(Model(name=str(tmp_path / "large")), None, None)
    if fits:
        names = gguf_file.write(tmp_path / fmt, weights, tokenizer, fmt, ABOUT)
        FileModel(tmp_path / fmt, weights, names)
    else:
        with refuses("--format", MergeError, names=name):
            gguf_file.write(tmp_path / fmt, weights, tokenizer, fmt, ABOUT)


CONTEXTS = {"ministral": 512, "phi3": 512, "mistral": 512}  # which ends with a window that llama.cpp does not have


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_in_the_order_of_the_model(family, tokenizer, tmp_path):
    weights = merge.stored_weights(Model(name=str(make(family, tmp_path / "model"))), None, None)
    names = gguf_file.write(tmp_path / "file", weights, tokenizer, "f32", ABOUT)
    read = FileModel(tmp_path / "file", weights, names)
    for name, value in read.model.named_parameters():
        torch.testing.assert_close(value, weights[name], rtol=0, atol=1e-6)
    fields, arch = gguf.GGUFReader(tmp_path / "file").fields, gguf_file.family_of(weights.config).arch
    assert fields[f"{arch}.context_length"].contents() == CONTEXTS.get(family, 1024)
    assert (f"{arch}.attention.sliding_window" in fields) == family.startswith(("olmo3", "gemma3", "gemma4"))


def test_a_weight_under_the_name_of_another_is_refused(nano, tokenizer, tmp_path):
    names = gguf_file.write(tmp_path / "file", nano, tokenizer, "q8_0", ABOUT)
    key, value = "blk.0.attn_k.weight", "blk.0.attn_v.weight"
    with pytest.raises(AssertionError, match="v_proj"):
        FileModel(tmp_path / "file", nano, names | {key: names[value], value: names[key]})


def test_the_tokenizer_is_in_the_file(nano, tokenizer, tmp_path):
    about = {"name": "demo", "base": "octet/tiny", "licence": "mit"}
    gguf_file.write(tmp_path / "file", nano, tokenizer, "q8_0", about)
    fields = gguf.GGUFReader(tmp_path / "file").fields

    def value(name):
        return fields[f"tokenizer.{name}"].contents()

    said = [fields[f"general.{name}"].contents() for name in ("name", "license", "base_model.0.name")]
    assert said == ["demo", "mit", "tiny"]
    assert fields["general.base_model.0.repo_url"].contents().endswith("/octet/tiny")
    assert value("ggml.pre") == "qwen2"
    assert [tokenizer.convert_tokens_to_ids(text) for text in value("ggml.tokens")] == list(range(480))
    assert value("ggml.eos_token_id") == value("ggml.eot_token_id") == 2
    assert not value("ggml.add_bos_token")
    assert value("chat_template") == tokenizer.chat_template
    assert value("ggml.token_type")[:4] == [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL]


WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BY_THREE = {"type": "Split", "pattern": {"Regex": vocabulary.BY_THREE_DIGITS}, "behavior": "Isolated", "invert": False}
BY_MARK = BY_THREE | {"pattern": {"Regex": vocabulary.BY_MARK}}
DIGITS = {"type": "Digits", "individual_digits": True}


def rules(normalizer, splits, ignore_merges) -> dict:
    model = {"type": "BPE", "ignore_merges": ignore_merges, "byte_fallback": False}
    return {"normalizer": normalizer, "pre_tokenizer": {"type": "Sequence", "pretokenizers": splits}, "model": model}


def test_the_name_of_a_tokenizer_follows_from_its_rules_or_it_is_refused():
    splits = [DIGITS, WORDS]
    assert vocabulary.pre_of(rules(None, [WORDS], False)) == "gpt-2"
    assert vocabulary.pre_of(rules(None, splits, False)) == "smollm"
    assert vocabulary.pre_of(rules({"type": "NFC"}, [BY_MARK, WORDS | {"use_regex": False}], False)) == "qwen35"
    assert vocabulary.pre_of(rules(None, [BY_THREE, WORDS | {"use_regex": False}], True)) == "llama-bpe"
    for wrong, reason in (
        (rules({"type": "Lowercase"}, splits, False), "Lowercase"),
        (rules(None, splits, True), "digits, gpt-2"),
        (rules(None, [{"type": "Whitespace"}], False), "Whitespace"),
        ({**rules(None, splits, False), "model": {"type": "Unigram"}}, "Unigram"),
    ):
        with refuses("--to", ModelError, names=reason):
            vocabulary.pre_of(wrong)
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    with refuses("--to", ModelError, names="SentencePiece"):
        vocabulary.begins_with_space({"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": metaspace})


EXPERTS = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
UNLIKE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}, "full_attention": YARN}
REFUSED = {
    "OlmoForCausalLM: it is not one of": ("olmo", {}),
    "its rope_type is dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "its rope_type is dynamic, without alpha": ("hunyuan_v1_dense", {"rope_parameters": DYNAMIC}),
    "some of its layers have a sliding window": ("exaone4", {}),
    "positions in every fourth layer": ("smollm3", {"no_rope_layers": [1] * 5}),
    "supports default, linear, yarn": ("qwen2", {"rope_parameters": LLAMA3}),
    "beta_slow are": ("qwen2", {"rope_parameters": {**YARN, "beta_fast": 16.0}}),
    "its output layer is its embedding": ("olmo2", {"tie_word_embeddings": True}),
    "its output layer is not its embedding": ("gemma", {"tie_word_embeddings": False}),
    "Olmo3ForCausalLM: its layers with a sliding window": ("olmo3", {"rope_parameters": UNLIKE}),
    "query_pre_attn_scalar is 99": ("gemma3_text", {"query_pre_attn_scalar": 99}),
    "linear_value_head_dim differ": ("qwen3_5_text", QWEN3_5 | {"linear_value_head_dim": 8}),
    "Qwen3_5ForCausalLM: its attention has biases": ("qwen3_5_text", QWEN3_5 | {"attention_bias": True}),
    "Gemma4ForCausalLM: its attention has biases": ("gemma4_text", GEMMA4 | {"attention_bias": True}),
    "are mixtures of experts, which Octet": ("gemma4_text", GEMMA4 | EXPERTS),
    "Qwen3ForCausalLM: its attention has biases": ("qwen3", {"attention_bias": True}),
    "its layers have biases": ("smollm3", {"mlp_bias": True}),
    "its activation is gelu": ("llama", {"hidden_act": "gelu"}),
    "its activation is silu": ("gemma3_text", {"hidden_activation": "silu", "query_pre_attn_scalar": 16}),
    "its logits have a soft cap": ("gemma3_text", {"final_logit_softcapping": 30.0, "query_pre_attn_scalar": 16}),
    "none of its layers has a sliding window": ("gemma4_text", GEMMA4 | {"layer_types": ["full_attention"] * 6}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_models_that_llama_cpp_would_compute_otherwise_are_refused(reason, tmp_path):
    kind, more = REFUSED[reason]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **more})).save_pretrained(tmp_path)
    with refuses("--to", ModelError, names=reason):
        gguf_file.family_of(AutoConfig.from_pretrained(tmp_path))


def test_answers_that_may_have_several_turns_are_not_compared():
    maze = f"task.name={ROOT / 'examples/maze.py'}:build"
    for setting, may in (("task.name=nano", False), ("task.tools=calculator", True), (maze, True)):
        assert _may_have_turns(resolve("nano", None, [setting]).task, None) is may
