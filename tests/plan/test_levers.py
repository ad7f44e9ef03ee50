"""Every lever changes nothing but memory: held against the plain run, through the real engine."""

import shutil

import bitsandbytes
import pytest
import torch

from tests.conftest import WITH_ENGINE, refuses
from tests.e2e.updates import ROWS, Case
from tests.model.test_variants import make_policy, one_update, read
from tests.step.test_engine import GRADREG, assert_same, launch
from trainer.batch.pack import to_tensors
from trainer.config import ds_config
from trainer.config.resolve import resolve
from trainer.loss import logprobs
from trainer.model import lora

KINDS = ("nf4", "int8")
FULL = ("lora.enabled=false", "algorithm.lr=0.001")
KL = ("algorithm.kl.coef=0.1", "algorithm.kl.refresh=2", "algorithm.epochs=2", "algorithm.top_entropy=0.5")
CHECKPOINTED = ("model.gradient_checkpointing=true",)
OFFLOADED = (*CHECKPOINTED, "model.activation_offload=true")
EAGER = ("model.attention=eager",)
LEVERS: dict[str, dict] = {"small micro-batches": {"budget": 30}}
LEVERS |= {"adapter zero2": {"ds_config": "zero2"}}  # the optimizer on the card
LEVERS |= {"checkpointing": {"settings": CHECKPOINTED}, "activation offload": {"settings": OFFLOADED}}
LEVERS |= {"padded rows": {"settings": ("optim.layout=padded",)}, "eager": {"settings": EAGER}}
LEVERS |= {"sdpa": {"settings": ("model.attention=sdpa",)}}
TOGETHER = {"everything": {"settings": (*OFFLOADED, *EAGER), "budget": 30, "ds_config": "zero2"}}
QUANTISED = LEVERS | TOGETHER
SLOW = ("lora.enabled=false", "algorithm.lr=0.00005")
SPLIT = {"adapter": (), "adapter objective": KL, "adapter checkpointed": OFFLOADED, "whole": SLOW}
SPLIT |= {"pissa": ("lora.init=pissa", "lora.rslora=true", "lora.plus_ratio=4"), "objective": (*SLOW, *KL)}
SPLIT |= {"checkpointed": (*SLOW, *OFFLOADED), "8 bit states": (*SLOW, "optim.name=adamw_8bit")}
SPLIT |= {"gradreg": GRADREG, "muon": ("optim.name=muon",), "whole muon": (*SLOW, "optim.name=muon")}

pytestmark = WITH_ENGINE


def dequantised(kind: str, layer) -> torch.Tensor:
    """Return the weights by bitsandbytes's functions, not by its layers."""
    if kind == "nf4":
        return bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return bitsandbytes.functional.int8_vectorwise_dequant(layer.weight.data, layer.weight.SCB)


@pytest.fixture(scope="module")
def twins(tiny_model, tmp_path_factory):
    """Make, for each kind, a clean model with the weights that the quantised one stands for."""
    folders = {}
    for kind in KINDS:
        folders[kind] = shutil.copytree(tiny_model, tmp_path_factory.mktemp("twins") / kind)
        model, clean = read(tiny_model, quantize=kind), read(tiny_model)
        for name, layer in model.named_modules():
            if "_proj" in name:
                clean.get_submodule(name).weight.data = dequantised(kind, layer).float()
        clean.save_pretrained(folders[kind])
    return folders


def case(name: str, **how) -> Case:
    """Make a case with a rate so low that Adam does not enlarge the rounding of a gradient that is nearly zero. The
    gradient itself is compared by its norm."""
    chosen = ("algorithm.lr=0.0002", *how.pop("settings", ()))
    return Case(name, **{"groups": [4], "settings": chosen, **how})


def over(kind: str, how: dict) -> dict:
    return how | {"settings": (*how.get("settings", ()), f"model.quantize={kind}"), "as_it_is": True}


@pytest.fixture(scope="module")
def updates(tiny_model, twins, splits, tmp_path_factory, tiers):
    cases = [case(name, **how) for name, how in {"plain": {}, **LEVERS}.items()]
    for kind in KINDS:
        cases.append(case(f"{kind} twin", settings=(f"model.name={twins[kind]}",), as_it_is=True))
        chosen = {"plain": {}, **(QUANTISED if "slow" in tiers else TOGETHER)}
        cases += [case(f"{kind} {name}", **over(kind, how)) for name, how in chosen.items()]
    cases.append(case("nf4 8 bit states", ds_config="zero2", **over("nf4", {"settings": ("optim.name=adamw_8bit",)})))
    for name, chosen in SPLIT.items():
        if f"{name} zero2" not in LEVERS:
            cases.append(case(f"{name} zero2", ds_config="zero2", settings=chosen))
        into = splits["zero3" if name == "8 bit states" else "zero3_offload"]
        cases.append(case(f"{name} split", ds_config=into, settings=chosen))
    if tiers == {"slow"}:
        needed = {f"{kind} {name}" for kind in KINDS for name in ("plain", *LEVERS)}
        cases = [one for one in cases if one.name in needed | {f"{name} zero2" for name in TWO_RANKS}]
    return launch(tiny_model, tmp_path_factory.mktemp("one") / "out.json", 1, cases)


@pytest.fixture(scope="module")
def two_ranks(tiny_model, splits, tmp_path_factory, tiers):
    dealt = {"groups": [3, 1], "budget": 30}
    cases = [
        case(f"{name} {zero}", ds_config=path, settings=SPLIT[name], **dealt)
        for name in TWO_RANKS
        for zero, path in splits.items()
        if ("quick" if zero == "zero3_offload" else "slow") in tiers
    ]
    if "quick" in tiers:
        cases.append(case("nf4", **over("nf4", dealt)))
    return launch(tiny_model, tmp_path_factory.mktemp("two") / "out.json", 2, cases)


TWO_RANKS = ("adapter", "adapter objective", "pissa", "whole", "objective", "gradreg", "muon", "whole muon")


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_changes_nothing_but_memory(updates, lever):
    assert_same(updates["plain"], updates[lever], tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lever", [*(pytest.param(name, marks=pytest.mark.slow) for name in LEVERS), *TOGETHER])
def test_a_lever_changes_nothing_over_a_quantised_base(updates, kind, lever):
    assert_same(updates[f"{kind} plain"], updates[f"{kind} {lever}"], tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_base_is_the_model_of_its_own_weights(updates, kind):
    assert_same(updates[f"{kind} twin"], updates[f"{kind} plain"], tolerance=1e-5)


def test_the_kinds_differ(updates):
    """So that what is the same above is not the same for another reason."""
    norms = [updates[f"{kind} plain"]["grad_norms"][0] for kind in KINDS]
    assert abs(norms[0] - norms[1]) > 1e-3


def test_8_bit_states_over_a_quantised_base(updates):
    """Nothing has been rounded yet at the first step."""
    eight, full = updates["nf4 8 bit states"]["grad_norms"], updates["nf4 plain"]["grad_norms"]
    assert eight[:2] == pytest.approx(full[:2], abs=1e-5)
    assert eight == pytest.approx(full, rel=1e-2)


@pytest.mark.parametrize("what", SPLIT)
def test_split_weights_give_the_update_of_whole_ones(updates, what):
    tolerance = 1e-5 if what == "8 bit states" else 1e-6  # these are rounded, in blocks that begin elsewhere
    assert_same_share(updates[f"{what} zero2"], updates[f"{what} split"], tolerance)


@pytest.mark.parametrize(
    "engine", ["zero3_offload", *(pytest.param(name, marks=pytest.mark.slow) for name in ("shipped", "zero3"))]
)
@pytest.mark.parametrize("what", TWO_RANKS)
def test_weights_split_over_two_ranks_give_the_update_of_one(updates, two_ranks, what, engine):
    tolerance = 1e-5 if what == "gradreg" else 1e-6  # that is divided by a small displacement
    assert_same_share(updates[f"{what} zero2"], two_ranks[f"{what} {engine}"], tolerance)


def assert_same_share(one: dict, other: dict, tolerance: float) -> None:
    """Compare norms relative to their size: those of a whole model are above 10, which fp32 rounds by 1e-6."""
    assert other["grad_norms"] == pytest.approx(one["grad_norms"], rel=tolerance)
    assert_same(one, other | {"grad_norms": one["grad_norms"]}, tolerance)


def test_two_ranks_over_a_quantised_base(updates, two_ranks):
    assert_same(updates["nf4 plain"], two_ranks["nf4"], tolerance=1e-5)


def test_offload_moves_the_input_of_each_layer_and_little_else(tiny_model, monkeypatch):
    moved = moves_of(monkeypatch)
    policy = make_policy(tiny_model, " ".join(OFFLOADED))
    policy.engine.train()
    batch = to_tensors(ROWS, 0)
    policy.score(batch)
    inputs = [kept for kept in moved if kept.shape == (1, batch.tree.line_N.numel(), 32)]
    assert len({tensor.data_ptr() for tensor in inputs}) == len(inputs), "copies"
    assert 2 <= len(inputs) <= 4, "of two layers, and of the last norm"
    assert sum(kept.numel() for kept in moved) <= 5 * inputs[0].numel()


def test_offload_keeps_nothing_while_it_only_measures(tiny_model, monkeypatch):
    moved = moves_of(monkeypatch)
    make_policy(tiny_model, " ".join(OFFLOADED)).measure(to_tensors(ROWS, 0))
    assert moved == []


def moves_of(monkeypatch) -> list[torch.Tensor]:
    """Return a list that gets what the offload copies to CPU memory from now on."""
    moved: list[torch.Tensor] = []

    class Recording(logprobs.save_on_cpu):
        def __init__(self, **options: bool) -> None:
            super().__init__(**options)
            really = self.pack_hook
            self.pack_hook = lambda tensor: moved.append(kept := really(tensor)[1]) or (tensor.device, kept)

    monkeypatch.setattr(logprobs, "save_on_cpu", Recording)
    return moved


def test_fp16_scales_its_loss_and_survives_a_scale_that_is_too_high(tiny_model, monkeypatch):
    """DeepSpeed refuses fp16 on a CPU for its speed. Told otherwise, it does there what it does on a card."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True, raising=False)
    policy, plain = make_policy(tiny_model, "", dtype="fp16"), make_policy(tiny_model)
    assert policy.engine.optimizer.loss_scale == 2.0**16
    assert one_update(policy).grad_norm == pytest.approx(one_update(plain).grad_norm, rel=1e-2)
    policy.engine.optimizer.loss_scaler.cur_scale = 2.0**40
    before, skipped = lora.fingerprint(policy.model), 0
    while one_update(policy).skipped:
        assert lora.fingerprint(policy.model) == before
        skipped += 1
    assert 2 <= skipped <= policy.bad_updates_allowed
    assert policy.engine.optimizer.loss_scale < 2.0**40
    assert lora.fingerprint(policy.model) != before


def test_flash_attention_is_refused_without_a_card():
    """What no machine can do is in tests/data/refusals.yaml."""
    with refuses("model.attention", names="card"):
        ds_config.check(resolve("nano", None, ["model.attention=flash"]), has_gpu=False)


def test_what_goes_together_is_not_refused():
    split = ["engine.ds_config=zero3", *OFFLOADED]
    eight = ["optim.name=adamw_8bit", "engine.ds_config=zero2"]
    for chosen in (eight, ["model.quantize=nf4", *OFFLOADED], split, [*split, *FULL], [*split, "lora.init=pissa"]):
        ds_config.check(resolve("nano", None, chosen), has_gpu=True)
