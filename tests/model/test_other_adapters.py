"""Adapters that another trainer has made with PEFT: other targets, ranks and scales by layer, layers as a whole."""

import json
import shutil
from contextlib import nullcontext

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.conftest import NANO, refuses
from tests.model.test_bad_models import edit
from trainer.commands import eval as evaluation
from trainer.commands.main import parser_of
from trainer.config.resolve import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import CheckpointError, MergeError, ModelError
from trainer.model import hub, lora, merge
from trainer.plan import downloads
from trainer.run_folder.model_source import Source

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
PATTERNS = {"rank_pattern": {"q_proj": 4, "layers.1.self_attn.v_proj": 2}, "alpha_pattern": {"q_proj": 32}}
KINDS = {
    "targets": {"target_modules": ["q_proj", "down_proj"]},
    "patterns": {"target_modules": ["q_proj", "v_proj"], **PATTERNS},
    "output": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},  # of a tied model
    "norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "layers": {"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "regex": {"target_modules": r".*\.self_attn\.(q|k)_proj", "use_rslora": True},  # as Unsloth writes it
    "bias": {"target_modules": ["q_proj"], "bias": "lora_only"},
    "both ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},  # PEFT stores these weights as well
}


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


IGNORED = ("Model has `tie_word_embeddings=True`", "The following rank_pattern", "Setting `save_embedding_layers`")
pytestmark = [pytest.mark.filterwarnings(f"ignore:{text}") for text in IGNORED]


@pytest.fixture
def adapter(tiny_model, tmp_path):
    def make(**options):
        torch.manual_seed(1)
        adapted = peft.get_peft_model(base(tiny_model), peft.LoraConfig(r=8, task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.02 * torch.randn_like(parameter))
        adapted.save_pretrained(tmp_path / "made")
        return tmp_path / "made", adapted(TOKENS).logits

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_the_same_here_and_merged(tiny_model, tmp_path, adapter, kind):
    folder, expected = adapter(**KINDS[kind])
    assert (expected - base(tiny_model)(TOKENS).logits).abs().max() > 1e-3
    torch.testing.assert_close(lora.load_adapter(base(tiny_model), folder)(TOKENS).logits, expected)
    merge.write_merged(Model(name=str(tiny_model)), folder, tmp_path / "whole", None)
    whole = base(tmp_path / "whole")
    assert whole.dtype == torch.float32, "the precision of the base"
    torch.testing.assert_close(whole(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)


def test_a_whole_layer_that_is_missing_is_an_error(tiny_model, adapter):
    folder, _ = adapter(**KINDS["norm"])
    file = folder / "adapter_model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "lora_" in name}, file)
    with refuses(folder, CheckpointError, names="norm.weight"):
        lora.load_adapter(base(tiny_model), folder)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_one_over_a_base_that_its_first_values_changed_is_refused(tiny_model, tmp_path, adapter, init):
    """Its factors are what is added to the rest of each weight, which is stored nowhere."""
    folder, _ = adapter(target_modules=["q_proj"], init_lora_weights=init)
    with refuses(folder, CheckpointError, names=f"init_lora_weights={init}"):
        lora.load_adapter(base(tiny_model), folder)
    with refuses(f"adapter {folder}", CheckpointError, names="init_lora_weights"):
        merge.write_merged(Model(name=str(tiny_model)), folder, tmp_path / "whole", "fp32")


@pytest.mark.parametrize(("kind", "is_teacher"), [("patterns", True), ("norm", False), ("both ends", False)])
def test_what_the_section_lora_cannot_say_is_not_trained_further(tiny_model, adapter, kind, is_teacher):
    options = {**KINDS[kind], "rank_pattern": {}}  # scales alone do not show in the shapes
    folder, expected = adapter(**options)
    with refuses("lora.start", CheckpointError, names="octet merge"):
        lora.add_adapter(base(tiny_model), Lora(r=8, alpha=8, targets=tuple(options["target_modules"]), start=folder))
    policy = lora.add_adapter(base(tiny_model), Lora())
    with nullcontext() if is_teacher else refuses("teacher.adapter", CheckpointError, names="octet merge"):
        lora.add_teacher(policy, folder)
        with lora.as_teacher(policy):
            torch.testing.assert_close(policy(TOKENS).logits, expected)


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed", "ignore:Adapter 'default'")
def test_one_that_cannot_be_merged_says_why(tiny_model, tmp_path, adapter):
    folder, _ = adapter(target_modules=["o_proj"], lora_bias=True)
    with refuses(folder, MergeError, names="layer"):
        merge.write_merged(Model(name=str(tiny_model)), folder, tmp_path / "whole", "fp32")


@pytest.fixture
def not_here(monkeypatch):
    """The models of these tests are on the hub only, which need not answer."""
    monkeypatch.setattr(evaluation.downloads, "check", lambda config, needs_data: None)


def settings(folder, *arguments: str, name: str | None, **more: str):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": name, **more}))
    options = parser_of("eval").parse_args(["--adapter", str(folder), *arguments])
    return evaluation.settings_for(options, evaluation.adapter_of(options))


def test_the_base_that_it_names_is_taken(tmp_path, tiny_model):
    assert settings(tmp_path / "a", name=str(tiny_model)).model.name == str(tiny_model)
    assert settings(tmp_path / "b", name=str(NANO)).model.name == "nano"


def test_the_base_is_taken_in_the_revision_that_it_names(tmp_path, tiny_model, not_here):
    for options, revision in (([], "v1"), (["--model", "some/base"], None), (["model.name=some/base"], None)):
        model = settings(tmp_path / "a", *options, name="some/base", revision="v1").model
        assert (model.name, model.revision) == ("some/base", revision)
    lora.save_adapter(lora.add_adapter(base(tiny_model), Lora(), "v1"), tmp_path / "b")
    assert peft.PeftConfig.from_pretrained(tmp_path / "b").revision == "v1"


def test_a_base_with_other_weights_than_in_the_run_is_refused_unless_it_is_named(tmp_path, tiny_model):
    config, name = resolve("nano", None, [f"model.name={tiny_model}"]), f"model.name={tiny_model}"
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    for fingerprint in (hub.fingerprint(config.model)[:16], ""):
        (tmp_path / "machine.json").write_text(json.dumps({"base weights": fingerprint}))
        assert settings(tmp_path / "adapter", name=str(tiny_model)).model.name == str(tiny_model)
    (tmp_path / "machine.json").write_text(json.dumps({"base weights": "0" * 16}))
    with refuses("model.name", CheckpointError, names="began"):
        settings(tmp_path / "adapter", name=str(tiny_model))
    assert settings(tmp_path / "adapter", name, name=str(tiny_model)).model.name == str(tiny_model)
    merged = Source(model_in(tmp_path / "merged", tiny_model))
    plain, named = (parser_of("eval").parse_args(["--merged", str(merged.folder), *more]) for more in ([], [name]))
    with refuses("model.name", CheckpointError, names="began"):
        evaluation.settings_for(plain, merged)
    assert evaluation.settings_for(named, merged).model.name == str(tiny_model)


@pytest.mark.parametrize("end", ["-unsloth-bnb-4bit", "-bnb-4bit"])
def test_the_4_bit_copy_of_unsloth_stands_for_the_model(tmp_path, not_here, end):
    model = "Qwen2.5-1.5B-Instruct"
    for options, found in (([], f"unsloth/{model}"), (["--model", f"Qwen/{model}"], f"Qwen/{model}")):
        assert settings(tmp_path / "a", *options, name=f"unsloth/{model}{end}").model.name == found


def model_in(folder, source, **changes):
    shutil.copytree(source, folder)
    edit(folder / "config.json", **changes)
    return folder


@pytest.mark.parametrize(("base", "model"), [
    ("Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-1.5B-Instruct"), ("Qwen/Qwen2.5-1.5B", "nano"), (str(NANO), "some/model"),
])  # fmt: skip
def test_another_base_is_refused_by_its_name(tmp_path, not_here, base, model):
    with refuses("--adapter", CheckpointError, names=f"over {'nano' if base == str(NANO) else base}, not over"):
        settings(tmp_path / "a", "--model", model, name=base)


def test_a_folder_is_known_by_its_name_and_by_the_one_in_its_configuration(tmp_path, not_here, tiny_model, capsys):
    for folder, origin in (("Qwen2.5-1.5B", "other/thing"), ("copy", "Qwen/Qwen2.5-1.5B")):
        same = str(model_in(tmp_path / folder, tiny_model, _name_or_path=origin))
        assert settings(tmp_path / "a", "--model", same, name="Qwen/Qwen2.5-1.5B").model.name == same
    other = str(model_in(tmp_path / "mine", tiny_model, _name_or_path="Qwen/Qwen2.5-3B"))
    with refuses("--adapter", CheckpointError, names=other):
        settings(tmp_path / "a", "--model", other, name="Qwen/Qwen2.5-1.5B")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B", "/gone/merged", None])
def test_a_folder_of_which_nothing_is_known_is_taken_with_a_warning(tmp_path, tiny_model, name, capsys):
    folder = str(model_in(tmp_path / "mine", tiny_model, hidden_size=32))
    for model in [folder] if name else [folder, "nano"]:
        for named in (["--model", model], [f"model.name={model}"]):
            assert settings(tmp_path / "a", *named, name=name).model.name == model
            assert f"is model.name={model} the same?\n" in capsys.readouterr().err
    with refuses("--adapter", CheckpointError, names=name or "--model"):
        settings(tmp_path / "a", *(["--preset", "nano"] if name else []), name=name)


@pytest.mark.parametrize(("key", "named"), [("lora.start", "model.name"), ("teacher.adapter", "teacher.name")])
def test_a_run_refuses_an_adapter_of_another_base(tmp_path, key, named):
    config = resolve("nano", None, [f"{named}=Qwen/Qwen3-1.7B", f"{key}={tmp_path}"])
    for base in ("Qwen/Qwen3-1.7B", "unsloth/Qwen3-1.7B", "/gone/merged"):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        downloads.find_adapters(config)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-1.7B-Base"}))
    with refuses(key, ModelError, names="over Qwen/Qwen3-1.7B-Base, not over Qwen/Qwen3-1.7B"):
        downloads.find_adapters(config)
