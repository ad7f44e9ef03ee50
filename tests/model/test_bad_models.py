"""Models and adapters that cannot be used: each is one short error with what to do, or works."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import Opens, refuses
from trainer.config.resolve import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import CheckpointError, DataError, ModelError
from trainer.machine import hardware
from trainer.model import hub, lora
from trainer.model.load import check_vocabulary, load_model, load_tokenizer, stop_tokens
from trainer.plan import downloads, memory_check, preflight
from trainer.problem.prompts import Prompter, end_token
from trainer.problem.task import make_task
from trainer.records import Problem

CPU = torch.device("cpu")
WEIGHTS, QUERY = "model.safetensors", "model.layers.0.self_attn.q_proj.weight"
OF_ADAPTER, BIAS = "adapter_model.safetensors", "model.layers.0.self_attn.o_proj.bias"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edited(name: str, **changes):
    return lambda folder: edit(folder / name, **changes)


settings, adapter_settings = partial(edited, "config.json"), partial(edited, "adapter_config.json")


def reweighed(change, name: str = WEIGHTS):
    """Return what stores other weights in a folder."""
    return lambda folder: save_file(change(load_file(folder / name)), folder / name, metadata={"format": "pt"})


def start(folder: Path, *overrides: str):
    """Do what a run does with its model before it samples, and return the tokenizer, the model and the prompter."""
    config = resolve("nano", None, [f"model.name={folder}", *overrides])
    preflight.complain([*memory_check.findings(config, hardware.Hardware(gpus=(), cores=2))])
    downloads.check(config)
    tokenizer = load_tokenizer(config.model)
    prompter = Prompter(tokenizer, config.prompt, make_task(config.task))
    model = load_model(config.model, "fp32", CPU)
    check_vocabulary(tokenizer, model)
    stop_tokens(tokenizer, model)
    return tokenizer, model, prompter


def say_nothing(folder: Path, templates=None) -> None:
    for path in folder.glob("*.jinja"):
        path.unlink()
    edit(folder / "tokenizer_config.json", chat_template=templates)


def have_no_end(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None, pad_token=None)
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()


def store_as(dtype: torch.dtype):
    return reweighed(lambda weights: weights | {QUERY: weights[QUERY].to(dtype)})


def pickle(folder: Path, name: str = WEIGHTS, called: str = "pytorch_model.bin", **more) -> None:
    weights = load_file(folder / name)
    (folder / name).unlink()
    torch.save(weights | more, folder / called)


def pickle_code(folder: Path, *names: str) -> None:
    pickle(folder, *names, more=Opens(folder / "opened"))


def resize(rows: int):
    def spoil(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.resize_token_embeddings(model.config.vocab_size + rows)
        model.save_pretrained(folder)

    return spoil


def pad_beyond(folder: Path) -> None:
    """Add a padding token to the tokenizer only, as many people do."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "spoil",
    [say_nothing, have_no_end, resize(40), store_as(torch.float64), store_as(torch.float8_e4m3fn), pickle, pad_beyond],
    ids=["no template", "no end", "more embeddings", "float64", "fp8", "pickled", "padding without an embedding"],
)
def test_a_model_that_can_be_used_is_used(folder, spoil):
    spoil(folder)
    tokenizer, model, _ = start(folder)
    assert model.dtype == torch.float32
    assert tokenizer.pad_token_id < model.config.vocab_size
    tokens = tokenizer(["What is 12 + 30?", "4"], padding=True, return_tensors="pt")["input_ids"]
    assert model(tokens).logits.isfinite().all()


@pytest.mark.parametrize("style", ["chat", "r1_zero"])
def test_a_base_model_without_a_template_and_an_end_is_asked_in_plain_text(folder, style):
    say_nothing(folder)
    have_no_end(folder)
    tokenizer, model, prompter = start(folder, f"prompt.style={style}")
    assert prompter.stop_strings
    stops = stop_tokens(tokenizer, model)
    assert stops == [tokenizer.get_vocab()["<|endoftext|>"]] == [end_token(prompter, stops)]
    with refuses("model.name", ModelError, names="eos_token"):
        end_token(prompter, [])


@pytest.mark.parametrize("name", ["model.gguf", "~/model.gguf"])
def test_a_file_is_no_folder_of_a_model(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with refuses("model.name", ModelError, names="GGUF"):
        hub.refuse_missing_folder(name if name[0] == "~" else str(tmp_path / name))


def test_a_repository_without_weights_is_refused_before_its_download(monkeypatch):
    monkeypatch.setattr(hub, "listing", lambda *_: {"config.json": 9, "Some-Q4_K_M.gguf": 99})
    with refuses("model.name", ModelError, names="no weights"):
        hub.find_model(Model(name="somebody/some-other-model"))


def test_a_template_that_wants_a_system_message_gets_it_and_ends_its_turns(folder):
    start(folder)
    turns = "{% for m in messages %}{{ m.content }}{{ '<|im_end|>' if m.role == 'assistant' }}{% endfor %}"
    wants = "{{ raise_exception('no system message') if messages[0].role != 'system' }}"
    (folder / "chat_template.jinja").write_text(wants + turns)
    edit(folder / "tokenizer_config.json", eos_token="<|im_start|>")
    tokenizer, model, prompter = start(folder, "prompt.system=Be brief.")
    end = tokenizer.get_vocab()["<|im_end|>"]
    model.generation_config.eos_token_id = None
    assert end in stop_tokens(tokenizer, model)
    assert end_token(prompter, [end]) == end
    _, _, silent = start(folder)
    with refuses("prompt", DataError, names="system=TEXT"):
        silent.prompt(Problem("", "1 + 1?", "2"))


def shard(folder: Path) -> list[Path]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    return sorted(folder.glob("model-*"))


def name_shards(folder: Path, name: str) -> None:
    shard(folder)
    edit(folder / f"{WEIGHTS}.index.json", weight_map={QUERY: name})


def become(kind: str, **shape):
    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        model = getattr(transformers, kind)
        model(model.config_class(vocab_size=600, **shape)).save_pretrained(folder)

    return spoil


def write(name: str, content: bytes):
    return lambda folder: (folder / name).write_bytes(content)


OWN_CODE = {"AutoConfig": "configuration_frob.Config"}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 4, "d_kv": 8}
VISION = {"image_size": 16, "patch_size": 8}
NAMED = [{"name": name, "template": "{{ messages[0].content }}"} for name in ("rag", "tool_use")]
BAD = {
    "an empty folder": (lambda folder: [path.unlink() for path in folder.iterdir()], "config.json"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "weights"),
    "a GGUF file": (lambda folder: (folder / WEIGHTS).rename(folder / "model.gguf"), "GGUF"),
    "cut short": (lambda folder: os.truncate(folder / WEIGHTS, 3000), "header"),
    "a pickle that calls a function": (pickle_code, "tensors"),
    "a missing shard": (lambda folder: shard(folder)[0].unlink(), "model-00001-of-"),
    "a broken index": (lambda folder: (shard(folder), write(f"{WEIGHTS}.index.json", b"{")(folder)), "index.json"),
    "a shard elsewhere": (lambda folder: name_shards(folder, "../model.safetensors"), "../model.safetensors"),
    "no text in the index": (lambda folder: name_shards(folder, 5), "TypeError"),
    "encoder and decoder": (become("T5ForConditionalGeneration", **T5), "T5ForConditionalGeneration"),
    "an encoder": (become("BertForMaskedLM", **SMALL), "BertForMaskedLM"),
    "a vision model": (become("ViTForImageClassification", **SMALL, **VISION), "ViTForImageClassification"),
    "an unknown kind": (settings(model_type="frobnicator"), "frobnicator"),
    "a kind that is no text": (settings(model_type={}), "loaded"),
    "code of its own": (settings(model_type="frobnicator", auto_map=OWN_CODE), "model.trust_remote_code=true"),
    "quantised": (settings(quantization_config={"quant_method": "fp8"}), "fp8"),
    "an unknown dtype": (settings(dtype="float7"), "float7"),
    "an unknown activation": (settings(hidden_act="nonsense"), "nonsense"),
    "layers of another number": (settings(layer_types=["full_attention"] * 5), "layer_types"),
    "a size that is no number": (settings(hidden_size="big"), "hidden_size is 'big'"),
    "a negative size": (settings(hidden_size=-4), "hidden_size is -4"),
    "heads that do not divide": (settings(num_attention_heads=5), "shape"),
    "a configuration that is a list": (write("config.json", b"[1]"), "list"),
    "a deep configuration": (write("config.json", b"[" * 3000), "config.json"),
    "a configuration of any bytes": (write("config.json", b"\xff\xfe\0"), "config.json"),
    "fewer embeddings": (resize(-40), "479"),
    "an adapter in it": (write("adapter_config.json", b"{}"), "there is an adapter in it"),
    "empty generation settings": (write("generation_config.json", b""), "generation_config.json cannot be read"),
    "a list of lists of ends": (write("generation_config.json", b'{"eos_token_id": [[2]]}'), "eos_token_id is [[2]]"),
    "an end that is no number": (write("generation_config.json", b'{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
    "no tokenizer": (lambda folder: [path.unlink() for path in folder.glob("*token*")], "tokenizer"),
    "a tokenizer of nothing": (write("tokenizer.json", b"{}"), "loaded"),
    "a tokenizer of another kind": (write("tokenizer_config.json", b"[1]"), "loaded"),
    "a broken template": (write("chat_template.jinja", b"{% for %}"), "line 1"),
    "templates without a default": (lambda folder: say_nothing(folder, NAMED), "chat_template.jinja"),
}


def cut_layers(count: int):
    return settings(num_hidden_layers=count, layer_types=["full_attention"] * count)


def say(**changes):
    """Write a model of 2 layers of LFM2, one of them a convolution, and change its config.json."""
    hybrid = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "tie_word_embeddings": False}
    made = become("Lfm2ForCausalLM", **{**SMALL, **hybrid, "num_key_value_heads": 2})
    return lambda folder: (made(folder), settings(**changes)(folder))


own_head = reweighed(lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1})
own_bias = reweighed(lambda weights: weights | {BIAS: torch.ones(32)})
BAD |= {  # config.json says something, and the weights show something else
    "more layers": (cut_layers(3), "model.layers.2.", "its files lack"),
    "fewer layers": (cut_layers(1), "model.layers.1.", "is no weight"),
    "another hidden size": (settings(hidden_size=48), "32 in its files", "48 by its config.json"),
    "a larger vocabulary": (settings(vocab_size=608), "480 x", "608 x"),
    "a wider feed-forward layer": (settings(intermediate_size=96), "_proj.weight", "96"),
    "other heads of keys": (settings(num_key_value_heads=4), "k_proj", "in its files, and 32"),
    "not tied": (settings(tie_word_embeddings=False), "lm_head.weight", "its files lack"),
    "tied": (own_head, "tie_word_embeddings is true", "not the embedding"),
    "another kind of layer": (say(layer_types=["full_attention"] * 2), "model.layers.0.self_attn", "its files lack"),
    "heads of another size": (say(head_dim=16), "layernorm.weight", "16 by its config.json"),
    "tied, of another family": (say(tie_word_embeddings=True), "tie_word_embeddings is true", "not the embedding"),
    "a bias without a place": (own_bias, "o_proj.bias", "is no weight"),
}


@pytest.mark.parametrize(("spoil", "told"), [(spoil, told) for spoil, *told in BAD.values()], ids=BAD)
def test_a_model_that_cannot_be_used_is_answered(folder, spoil, told):
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        start(folder)
    assert refused.value.key in ("model.name", str(folder / f"{WEIGHTS}.index.json"))
    said = str(refused.value)
    assert [fact for fact in told if fact not in said] == []
    assert len(said) < 700
    assert not (folder / "opened").exists()


@pytest.mark.parametrize(("targets", "told"), [
    (("q_prj",), "layer q_prj to adapt. Did you mean q_proj?"), (("q_proj", "w_down"), "layer w_down to adapt."),
])  # fmt: skip
def test_targets_that_are_no_layers_are_named_with_the_nearest(tiny_model, targets, told):
    with refuses("lora.targets", names=told):
        lora.add_adapter(AutoModelForCausalLM.from_pretrained(tiny_model), Lora(targets=targets))


@pytest.fixture(scope="module")
def good_adapter(tiny_model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("adapters") / "adapter"
    model = lora.add_adapter(AutoModelForCausalLM.from_pretrained(tiny_model), Lora(r=4, targets="attention"))
    lora.save_adapter(model, path)
    return path


def save_other(kind: str, **options):
    def spoil(path: Path) -> None:
        shutil.rmtree(path)
        base = AutoModelForCausalLM.from_pretrained(path.parent / "model")
        peft.get_peft_model(base, getattr(peft, kind)(task_type="CAUSAL_LM", **options)).save_pretrained(path)

    return spoil


BAD_ADAPTERS = {
    "no weights": (lambda path: (path / OF_ADAPTER).unlink(), OF_ADAPTER),
    "cut short": (lambda path: os.truncate(path / OF_ADAPTER, 200), "read"),
    "IA3": (save_other("IA3Config", target_modules=["k_proj"], feedforward_modules=[]), "IA3"),
    "a prompt": (save_other("PromptTuningConfig", num_virtual_tokens=3), "PROMPT_TUNING"),
    "an unknown method": (adapter_settings(peft_type=5), "it is 5"),
    "Megatron": (adapter_settings(megatron_config={"a": 1}, megatron_core="os"), "Megatron"),
    "another rank": (adapter_settings(r=8), "size mismatch"),
    "a rank of 0": (adapter_settings(r=0), "fit"),
    "a rank that is no number": (adapter_settings(r="x"), "fit"),
    "other layers": (adapter_settings(target_modules=["nothing"]), "fit"),
    "a broken pattern": (adapter_settings(target_modules="((("), "fit"),
    "a list": (lambda path: (path / "adapter_config.json").write_text("[1]"), "list"),
    "a deep list": (lambda path: (path / "adapter_config.json").write_text("[" * 3000), "config.json"),
    "a missing weight": (reweighed(lambda w: {name: w[name] for name in sorted(w)[1:]}, OF_ADAPTER), "1 weights"),
    "weights of other names": (reweighed(lambda w: {f"x.{name}": w[name] for name in w}, OF_ADAPTER), "32 weights"),
    "a pickle that calls a function": (lambda path: pickle_code(path, OF_ADAPTER, "adapter_model.bin"), "tensors"),
    **{  # their weights have the same shapes, so PEFT would use those that are there
        f"a base of {layers} layers": (lambda path, layers=layers: cut_layers(layers)(path.parent / "model"), "weights")
        for layers in (1, 3)
    },
    "another class": (adapter_settings(auto_mapping={"base_model_class": "GPT2LMHeadModel"}), "GPT2LMHeadModel"),
    "a mapping that is none": (adapter_settings(auto_mapping=5, target_modules=["nothing"]), "fit"),
    "no numbers": (reweighed(lambda w: {name: w[name] / 0 for name in w}, OF_ADAPTER), "finite"),
    "half of its factors": (reweighed(lambda w: {n: w[n] for n in w if "lora_B" not in n}, OF_ADAPTER), "only one"),
}


@pytest.mark.parametrize(("spoil", "told"), BAD_ADAPTERS.values(), ids=BAD_ADAPTERS)
def test_an_adapter_that_cannot_be_used_is_answered(folder, good_adapter, spoil, told):
    path = Path(shutil.copytree(good_adapter, folder.parent / "adapter"))
    spoil(path)
    with pytest.raises(CheckpointError) as refused:
        lora.load_adapter(AutoModelForCausalLM.from_pretrained(folder), path)
    assert str(refused.value).removeprefix("adapter ").startswith(f"{path}: ")
    assert told in str(refused.value)
    assert len(str(refused.value)) < 700
    assert not (path / "opened").exists()


def test_a_pickled_adapter_is_read(folder, good_adapter):
    path = Path(shutil.copytree(good_adapter, folder.parent / "adapter"))
    pickle(path, OF_ADAPTER, "adapter_model.bin")
    lora.load_adapter(AutoModelForCausalLM.from_pretrained(folder), path)
