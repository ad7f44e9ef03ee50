"""The learning rate, the adapter, one that is trained further, and what they say when they cannot be."""

import json

import peft
import pytest
import torch
from torch.testing import assert_close

from tests.conftest import refuses
from tests.model.test_variants import read
from tests.rollout.test_decoder import family, move_adapter
from trainer.config.settings import Lora, Optim
from trainer.errors import CheckpointError
from trainer.model import lora
from trainer.model.fast_lora import LowRank, use_own
from trainer.model.load import resolve_dtype
from trainer.step.optimizer import schedule


@pytest.mark.parametrize(("name", "expected"), [
    # ten steps, two of warm-up: 1/3, 2/3, then the descent over eight
    ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),
    ("linear", [1 / 3, 2 / 3, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
    ("cosine", [1 / 3, 2 / 3, 1, 0.96194, 0.85355, 0.69134, 0.5, 0.30866, 0.14645, 0.03806]),
])  # fmt: skip
def test_the_learning_rate_by_hand(name, expected):
    settings = Optim(schedule=name, warmup=0.2)
    assert [schedule(settings, step, 10) for step in range(10)] == pytest.approx(expected, abs=1e-5)


def test_the_fingerprint_moves_with_the_adapter_only(tiny_model):
    model = lora.add_adapter(read(tiny_model), Lora())
    before = lora.fingerprint(model)
    with torch.no_grad():
        model.get_base_model().model.norm.weight.add_(1.0)
        assert lora.fingerprint(model) == before
        next(p for name, p in model.named_parameters() if "lora_B" in name).add_(1e-6)
    assert lora.fingerprint(model) != before


def test_the_precision_of_a_processor():
    assert resolve_dtype("auto", torch.device("cpu")) == "fp32"
    assert resolve_dtype("bf16", torch.device("cpu")) == "bf16"
    with refuses("model.dtype", names="fp32"):
        resolve_dtype("fp16", torch.device("cpu"))


@pytest.mark.parametrize("kind", ["none", "nf4", "int8"])
def test_a_teacher_beside_the_adapter_computes_only_where_it_is_asked(tiny_model, tmp_path, kind):
    """The layers that only the teacher adapts are as they were, and nothing of it is trained or written."""
    tokens = torch.tensor([[5, 6, 7]])
    apart = lora.add_adapter(read(tiny_model, quantize=kind), Lora(r=2, targets="all", dora=kind == "none"))
    move_adapter(apart, seed=1)
    lora.save_adapter(apart, tmp_path / "teacher")
    model = lora.add_adapter(read(tiny_model, quantize=kind), Lora(r=4, targets="attention"))
    before, trained = model(tokens).logits, lora.trainable(model).keys()
    lora.add_teacher(model, tmp_path / "teacher")
    for _ in range(2):
        assert torch.equal(model(tokens).logits, before)
        assert lora.trainable(model).keys() == trained
        with lora.as_teacher(model):
            assert torch.equal(model(tokens).logits, apart(tokens).logits)
            assert not lora.trainable(model)
    lora.save_adapter(model, tmp_path / "written")
    (tmp_path / "ours").touch()  # with the permissions of the umask, as all files of a run
    modes = [file.stat().st_mode for file in (tmp_path / "ours", tmp_path / "written/adapter_model.safetensors")]
    assert modes[0] == modes[1]
    assert not (tmp_path / "written/teacher").exists()
    assert all("mlp" not in name for name in peft.utils.load_peft_weights(str(tmp_path / "written")))


# layers of attention
OTHERS = {"phi3": {"qkv_proj", "o_proj"}, "lfm2": {"q_proj", "k_proj", "v_proj", "out_proj"}}
OTHERS |= {"lfm3": {"q_proj", "k_proj", "v_proj", "o_proj", "g_proj"}}


@pytest.mark.parametrize("name", OTHERS)
def test_the_attention_of_other_families_is_adapted_and_nothing_else(name):
    names = lora.trainable(lora.add_adapter(family(name), Lora(targets="attention")))
    assert {one.partition(".lora_")[0].rpartition(".")[2] for one in names} == OTHERS[name]
    assert all(".self_attn." in one for one in names)


def made(tiny_model, **settings):
    return lora.add_adapter(read(tiny_model), Lora(**{"r": 4, "alpha": 8, "targets": "attention", **settings}))


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("stored"), made(tiny_model)
    move_adapter(model, seed=1)
    lora.save_adapter(model, folder)
    return folder, lora.trainable(model)


def test_it_begins_with_the_values_of_the_folder(tiny_model, stored):
    folder, values = stored
    found = lora.trainable(made(tiny_model, start=folder))
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


def test_the_layers_are_named_in_the_same_order_by_every_process(tiny_model, tmp_path):
    """PEFT has them in a set, and a run that starts from the adapter compares the file when it resumes."""
    lora.save_adapter(made(tiny_model, targets="all"), tmp_path)
    named = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert named == sorted(named)


@pytest.mark.parametrize(("settings", "named"), [
    ({"r": 8}, "lora_A"), ({"targets": "all"}, "mlp"), ({"alpha": 16}, "lora.alpha=8"), ({"rslora": True}, "=false"),
])  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_by_name(tiny_model, stored, settings, named):
    with refuses("lora.start", CheckpointError, names=named):
        made(tiny_model, start=stored[0], **settings)


def gradients(model):
    hidden = torch.randn(1, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    output = model(inputs_embeds=hidden.requires_grad_()).logits
    output.square().mean().backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad()
    return {"output": output.detach(), "hidden": hidden.grad, **found}


@pytest.mark.parametrize(("quantize", "close"), [("none", 1e-6), ("nf4", 1e-6), ("int8", 1e-6), ("bf16", 0.02)])
def test_results_and_gradients_are_those_of_peft(tiny_model, quantize, close):
    model = lora.add_adapter(read(tiny_model, quantize=quantize), Lora(r=4, targets="all")).train()
    move_adapter(model, seed=3)
    expected = gradients(model)
    use_own(model)
    assert all(type(layer.lora_variant["default"]) is LowRank for _, layer in lora.layers(model))
    found = gradients(model)
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-6, atol=close * float(value.abs().max()))


def test_a_model_may_change_the_result_in_place(tiny_model):
    use_own(model := lora.add_adapter(read(tiny_model), Lora(r=64)))  # a rank above the size of its weights
    _, layer = next(lora.layers(model))
    layer(torch.ones(1, 2, layer.in_features)).mul_(2).sum().backward()
    assert layer.lora_B["default"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [Lora(dora=True, targets="attention"), Lora(targets=("embed_tokens",))])
def test_other_layers_are_left_to_peft(tiny_model, settings):
    use_own(model := lora.add_adapter(read(tiny_model), settings))
    assert not any(isinstance(layer.lora_variant.get("default"), LowRank) for _, layer in lora.layers(model))
