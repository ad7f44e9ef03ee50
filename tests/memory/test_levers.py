"""Every lever changes nothing but memory: held against the plain run, through the real engine."""

import json
import os
import shutil
import subprocess
import sys

import bitsandbytes
import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.updates import IDLE, ROWS, Case, groups_of, settings
from tests.forks import forked
from tests.model.test_variants import advance, assert_close, logits, make_policy, read
from tests.rollout.test_decoder import SOME, assert_greedy_is_generate, move_adapter, prompts, sample
from tests.step.test_engine import assert_same, launch
from trainer.batch.pack import Packer, minibatches, to_tensors
from trainer.commands import main as cli
from trainer.config import ds_config
from trainer.config.command_line import resolve
from trainer.config.settings import Lora, Model
from trainer.errors import ConfigError, ModelError, TrainingError
from trainer.loss import logprobs
from trainer.loss.logprobs import LogProbs
from trainer.machine import hardware
from trainer.model import lora, quantised
from trainer.model import merge as export
from trainer.model.load import load_model
from trainer.records import TrainingRow
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.make import make_sampler
from trainer.step.update import backward, update
from trainer.watch.tally import Tally

KINDS = ("nf4", "int8")
CPU = torch.device("cpu")
FULL = ("lora.enabled=false", "algorithm.lr=0.001")
KL = ("algorithm.kl.coef=0.1", "algorithm.kl.refresh=2", "algorithm.epochs=2", "algorithm.top_entropy=0.5")
CHECKPOINTED = ("model.gradient_checkpointing=true",)
OFFLOADED = (*CHECKPOINTED, "model.activation_offload=true")
EAGER = ("model.attention=eager",)
LEVERS = {
    "checkpointing": {"settings": CHECKPOINTED},
    "activation offload": {"settings": OFFLOADED},
    "padded rows": {"settings": ("optim.layout=padded",)},
    "sdpa": {"settings": ("model.attention=sdpa",)},
    "eager": {"settings": EAGER},
    "small micro-batches": {"budget": 30},
    "optimizer on the card": {"ds_config": "zero2"},
}
QUANTISED = LEVERS | {"everything": {"settings": (*OFFLOADED, *EAGER), "budget": 30, "ds_config": "zero2"}}
SLOW = ("lora.enabled=false", "algorithm.lr=0.00005")
SPLIT = {
    "adapter": (),
    "adapter objective": KL,
    "adapter checkpointed": OFFLOADED,
    "pissa": ("lora.init=pissa", "lora.rslora=true", "lora.plus_ratio=4"),
    "whole": SLOW,
    "objective": (*SLOW, *KL),
    "checkpointed": (*SLOW, *OFFLOADED),
    "8 bit states": (*SLOW, "optim.name=adamw_8bit"),
}

pytestmark = [
    pytest.mark.usefixtures("alone"),
    # DeepSpeed imports parts of torch that warn about themselves
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # and its ZeRO-3 calls torch by old names
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
]


def base(folder, kind: str = "none", dtype: str = "fp32"):
    return load_model(Model(name=str(folder), quantize=kind), dtype, CPU)


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
        model, clean = base(tiny_model, kind), read(tiny_model)
        for name, layer in model.named_modules():
            if "_proj" in name:
                clean.get_submodule(name).weight.data = dequantised(kind, layer).float()
        clean.save_pretrained(folders[kind])
    return folders


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> dict[str, str]:
    """ZeRO-3 as shipped, and without DeepSpeed's threshold: it splits no tensor of fewer than 100,000 numbers, and so
    nothing of a tiny model."""
    found = {"shipped": "zero3"}
    for name in ("zero3", "zero3_offload"):
        settings = ds_config.read(name)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = tmp_path_factory.mktemp("ds") / f"{name}.json"
        path.write_text(json.dumps(settings))
        found[name] = str(path)
    return found


@pytest.fixture(scope="module")
def split(splits) -> str:
    return splits["zero3_offload"]


def case(name: str, **how) -> Case:
    """Make a case with a rate so low that Adam does not enlarge the rounding of a gradient that is nearly zero. The
    gradient itself is compared by its norm.
    """
    chosen = ("algorithm.lr=0.0002", *how.pop("settings", ()))
    return Case(name, **{"groups": [4], "settings": chosen, **how})


def over(kind: str, how: dict) -> dict:
    return how | {"settings": (*how.get("settings", ()), f"model.quantize={kind}"), "as_it_is": True}


@pytest.fixture(scope="module")
def updates(tiny_model, twins, splits, tmp_path_factory):
    cases = [case(name, **how) for name, how in {"plain": {}, **LEVERS}.items()]
    for kind in KINDS:
        cases.append(case(f"{kind} twin", settings=(f"model.name={twins[kind]}",), as_it_is=True))
        cases += [case(f"{kind} {name}", **over(kind, how)) for name, how in {"plain": {}, **QUANTISED}.items()]
    cases.append(case("nf4 8 bit states", ds_config="zero2", **over("nf4", {"settings": ("optim.name=adamw_8bit",)})))
    for name, chosen in SPLIT.items():
        cases.append(case(f"{name} zero2", ds_config="zero2", settings=chosen))
        into = splits["zero3" if name == "8 bit states" else "zero3_offload"]
        cases.append(case(f"{name} split", ds_config=into, settings=chosen))
    return launch(tiny_model, tmp_path_factory.mktemp("one") / "out.json", 1, cases)


@pytest.fixture(scope="module")
def two_ranks(tiny_model, splits, tmp_path_factory, with_slow):
    dealt = {"groups": [3, 1], "budget": 30}
    cases = [
        case(f"{name} {zero}", ds_config=path, settings=SPLIT[name], **dealt)
        for name in TWO_RANKS
        for zero, path in splits.items()
        if with_slow or zero == "zero3_offload"
    ]
    cases.append(case("nf4", **over("nf4", dealt)))
    return launch(tiny_model, tmp_path_factory.mktemp("two") / "out.json", 2, cases)


TWO_RANKS = ("adapter", "adapter objective", "pissa", "whole", "objective")


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_changes_nothing_but_memory(updates, lever):
    assert_same(updates["plain"], updates[lever], tolerance=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lever", QUANTISED)
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
    assert_same_share(updates[f"{what} zero2"], two_ranks[f"{what} {engine}"], tolerance=1e-6)


def assert_same_share(one: dict, other: dict, tolerance: float) -> None:
    """Compare norms relative to their size: those of a whole model are above 10, which fp32 rounds by 1e-6."""
    assert other["grad_norms"] == pytest.approx(one["grad_norms"], rel=1e-6)
    assert_same(one, other | {"grad_norms": one["grad_norms"]}, tolerance)


def test_two_ranks_over_a_quantised_base(updates, two_ranks):
    assert_same(updates["nf4 plain"], two_ranks["nf4"], tolerance=1e-5)


# The quantised base, and the rest of the program.


def quantised_and_adapted(folder, kind: str, **options):
    model = lora.add_adapter(base(folder, kind), Lora(r=4, targets="all", **options))
    move_adapter(model, seed=1)
    return model


def test_only_the_layers_between_embedding_and_output_are_quantised(tiny_model):
    for kind, stored in zip(KINDS, (torch.uint8, torch.int8), strict=True):
        model = base(tiny_model, kind, "bf16")
        assert {layer.weight.dtype for layer in quantised.layers(model)} == {stored}
        assert len(list(quantised.layers(model))) == 14
        assert model.lm_head.weight is model.model.embed_tokens.weight
        rest = {value.dtype for name, value in model.named_parameters() if "_proj.weight" not in name}
        assert rest == {torch.bfloat16}


def test_the_scales_of_4_bit_blocks_are_quantised_too(tiny_model):
    layer = next(quantised.layers(base(tiny_model, "nf4", "bf16")))
    assert layer.weight.quant_state.nested
    assert layer.weight.quant_state.quant_type == "nf4"
    assert layer.compute_dtype == torch.bfloat16


def test_an_output_layer_of_its_own_is_not_quantised(tiny_model, tmp_path):
    folder = shutil.copytree(tiny_model, tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    for kind in KINDS:
        assert type(base(folder, kind).lm_head) is torch.nn.Linear


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", [HfSampler, DecodeSampler])
def test_sampling_over_a_quantised_base(tiny_model, tokenizer, kind, sampler):
    model, asked = quantised_and_adapted(tiny_model, kind), prompts(9, 3, 14)
    assert isinstance(make_sampler(resolve("nano").rollout, model, tokenizer, [2]), DecodeSampler)
    greedy = sample(sampler, model, tokenizer, asked, stops=SOME, temperature=0.0)
    assert_greedy_is_generate(greedy, model, asked, SOME)
    groups = sample(sampler, model, tokenizer, asked, stops=SOME)
    rows = [TrainingRow(asked[i].tokens, one.tokens, one.logprobs, 0.0) for i, group in groups.items() for one in group]
    batch = to_tensors(rows, 0)
    with torch.no_grad():
        trained_BT = LogProbs(model.train(), temperature=1.0)(batch).logprobs_BT
    assert_close(trained_BT, batch.sampled_logprobs_BT * batch.mask_BT, 5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_goes_through_a_quantised_model_once(tiny_model, kind):
    assert make_policy(tiny_model, f"model.quantize={kind}").is_flat
    assert not make_policy(tiny_model, f"model.quantize={kind} model.attention=eager").is_flat


@pytest.mark.parametrize("more", ["", "lora.dora=true", "lora.rslora=true lora.plus_ratio=4"])
def test_variants_over_4_bits_learn_and_return_to_their_base(tiny_model, more):
    policy = make_policy(tiny_model, f"model.quantize=nf4 {more}")
    original = logits(base(tiny_model, "nf4"))
    trained = logits(advance(policy, 0).model)
    with policy.as_base():
        assert_close(logits(policy.model), original)
    assert (trained - original).abs().max() > 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_over_a_quantised_base_resumes_exactly_from_an_adapter_sized_checkpoint(tiny_model, tmp_path, kind):
    more = f"model.quantize={kind}"
    undisturbed = advance(make_policy(tiny_model, more), 0, 1, 2)
    advance(make_policy(tiny_model, more), 0, 1).save(tmp_path)
    saved = torch.load(next(tmp_path.glob("engine/*model_states.pt")), weights_only=False)["module"]
    assert saved
    assert all("lora_" in name for name in saved), "the base is not written"
    resumed = make_policy(tiny_model, more)
    resumed.load(tmp_path)
    advance(resumed, 2)
    for name, value in lora.trainable(undisturbed.model).items():
        assert torch.equal(lora.trainable(resumed.model)[name], value), name
    assert_close(logits(resumed.model), logits(undisturbed.model), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_released_policy_holds_nothing_of_its_quantised_base(tiny_model, kind):
    policy = advance(make_policy(tiny_model, f"model.quantize={kind}"), 0)
    layers = list(quantised.layers(policy.model))
    policy.release()
    assert not any(value.numel() for value in (*policy.model.parameters(), *policy.model.buffers()))
    for layer in layers:
        assert getattr(layer.weight, "quant_state", None) is None
        assert getattr(layer, "state", None) is None or layer.state.CB is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_is_merged_into_the_clean_base(tiny_model, tmp_path, kind):
    policy = advance(make_policy(tiny_model, f"model.quantize={kind}"), 0)
    policy.export(tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tiny_model)
    export.merge(policy.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    adapted = policy.model.base_model.model.model.layers[1].self_attn.q_proj
    clean = read(tiny_model).model.layers[1].self_attn.q_proj.weight
    merged = read(tmp_path / "merged").model.layers[1].self_attn.q_proj.weight
    assert_close(merged.detach(), (clean + adapted.get_delta_weight("default")).detach(), 1e-6)


def test_a_4_bit_weight_is_never_packed_for_a_processor(tiny_model):
    """On some processors bitsandbytes packs it in eval mode, and it then has no gradient."""
    layer = next(quantised.layers(base(tiny_model, "nf4")))
    assert layer.support_avx512bf16_for_cpu is False


# Split weights, and the rest of the program.


KINDS_OF_SPLIT = pytest.mark.parametrize("trained", ["", " ".join(FULL)], ids=["adapter", "whole"])


@pytest.fixture
def split_policy(tiny_model, split):
    def make(*more: str):
        policy = make_policy(tiny_model, f"engine.ds_config={split} {' '.join(more)}")
        assert not any(value.numel() for value in policy.model.parameters())
        return policy

    return make


def gathered_logits(policy) -> torch.Tensor:
    with policy.gathered():
        return logits(policy.model)


@KINDS_OF_SPLIT
def test_split_weights_are_all_there_while_gathered_and_nowhere_else(split_policy, tokenizer, trained):
    policy, asked = split_policy(trained), prompts(9, 3, 14)
    for _ in range(2):
        with policy.gathered(), policy.gathered():
            greedy = sample(DecodeSampler, policy.model, tokenizer, asked, stops=SOME, temperature=0.0)
            assert_greedy_is_generate(greedy, policy.model, asked, SOME)
            assert_close(
                policy.measure(to_tensors(ROWS, 0)).logprobs_BT,
                LogProbs(policy.model, 0.7)(to_tensors(ROWS, 0)).logprobs_BT.detach(),
                1e-5,
            )
        assert not any(value.numel() for value in policy.model.parameters())
        before = policy.fingerprint()
        advance(policy, 0)
        assert policy.fingerprint() != before
        assert not any(value.numel() for value in policy.model.parameters())


@KINDS_OF_SPLIT
def test_the_base_and_the_reference_of_split_weights(tiny_model, split_policy, trained):
    policy = split_policy(trained, "algorithm.kl.coef=0.1")
    original, batch = logits(read(tiny_model)), to_tensors(ROWS, 0)
    at_first = policy.measure(batch).logprobs_BT
    moved = gathered_logits(advance(policy, 0))
    assert (moved - original).abs().max() > 0.01
    for base_of in (policy.as_base, policy.as_reference):
        with base_of():
            assert_close(logits(policy.model), original)
            assert_close(policy.measure(batch).logprobs_BT, at_first, 1e-5)
    assert torch.equal(gathered_logits(policy), moved)
    assert (policy.measure(batch).logprobs_BT - at_first).abs().max() > 0.01


def test_a_split_model_is_exported_and_resumed(split_policy, tmp_path):
    resumed = resumed_exactly(split_policy, tmp_path / "checkpoint", *FULL)
    with resumed.gathered():
        resumed.export(tmp_path / "model")
    assert_close(logits(read(tmp_path / "model")), gathered_logits(resumed), 1e-6)
    resumed.release()


@pytest.mark.parametrize("kind", [(), ("lora.init=pissa",)], ids=["lora", "pissa"])
def test_an_adapter_over_a_split_base_is_exported_merged_and_resumed(tiny_model, split_policy, tmp_path, kind):
    checkpoint = tmp_path / "checkpoint"
    resumed = resumed_exactly(split_policy, checkpoint, *kind)
    with resumed.gathered():
        resumed.export(tmp_path / "adapter")
    for name, step in (("adapter", (2,)), ("checkpoint/adapter", ())):
        policy = advance(resumed_from(split_policy, checkpoint, *kind), *step)
        adapted = lora.load_adapter(read(tiny_model), tmp_path / name)
        assert_close(logits(adapted), gathered_logits(policy), 1e-5)
    export.merge(resumed.config.model, tmp_path / "adapter", tmp_path / "merged", "fp32")
    assert_close(logits(read(tmp_path / "merged")), gathered_logits(resumed), 1e-5)


def resumed_exactly(split_policy, checkpoint, *settings: str):
    """A run that is cut off after two of three steps, held against the undisturbed one."""
    undisturbed = advance(split_policy(*settings), 0, 1, 2)
    advance(split_policy(*settings), 0, 1).save(checkpoint)
    resumed = advance(resumed_from(split_policy, checkpoint, *settings), 2)
    assert torch.equal(gathered_logits(resumed), gathered_logits(undisturbed))
    return resumed


def resumed_from(split_policy, checkpoint, *settings: str):
    policy = split_policy(*settings)
    policy.load(checkpoint)
    return policy


def test_a_checkpoint_holds_nothing_of_a_split_frozen_base(tiny_model, split_policy, tmp_path):
    policy = advance(split_policy(), 0)
    policy.save(tmp_path)
    trained = sum(value.numel() for value in lora.trainable(lora.add_adapter(read(tiny_model), Lora(r=4))).values())
    size = sum(path.stat().st_size for path in (tmp_path / "engine").iterdir())
    assert size < 4 * 4 * trained + 60_000  # values and two of Adam; what pickle takes for names
    (states,) = (tmp_path / "engine").glob("*model_states.pt")
    assert all("lora_" in name for name in torch.load(states, weights_only=False)["module"])


def test_pissa_over_a_split_base_starts_as_the_run_did_that_it_goes_on_with(tiny_model, split_policy, tmp_path):
    """Factors of another machine: what is left of the base is made to fit them, in all of its parts."""
    advance(split_policy("lora.init=pissa"), 0).save(tmp_path)
    (states,) = (tmp_path / "engine").glob("*model_states.pt")
    saved = torch.load(states, weights_only=False)
    saved["start"] = {name: -value if "lora_" in name else value for name, value in saved["start"].items()}
    scaled = next(name for name in saved["start"] if "lora_B" in name)
    saved["start"][scaled] *= 2.0
    torch.save(saved, states)
    policy = resumed_from(split_policy, tmp_path, "lora.init=pissa")
    with policy.as_base():
        assert_close(logits(policy.model), logits(read(tiny_model)))


@KINDS_OF_SPLIT
def test_a_rehearsal_with_split_weights_leaves_nothing_behind(split_policy, trained):
    plain, rehearsed = split_policy(trained), split_policy(trained)
    (batch,) = minibatches(groups_of(ROWS, "dapo"), IDLE, plain.config, Packer(10_000, 0, plain.is_flat))
    rehearsed.rehearse(lambda: backward(rehearsed, batch, plain.config, 0.0, Tally()))
    for policy in (plain, rehearsed):
        advance(policy, 0, 1)
    assert torch.equal(gathered_logits(rehearsed), gathered_logits(plain))


def test_a_pass_over_split_weights_that_breaks_off_ends_the_run_unless_they_are_gathered(split_policy):
    policy = split_policy()
    with pytest.raises(TrainingError, match=r"optim.tokens_per_micro_batch=10000: .*Write .*_micro_batch=5000\."):
        policy.start_over()
    with policy.gathered():
        policy.start_over()


def test_an_adapter_over_a_split_base_is_trained_in_bf16(tiny_model, split):
    shared, plain = (make_policy(tiny_model, f"engine.ds_config={zero}", dtype="bf16") for zero in (split, "zero2"))
    assert {value.dtype for value in shared.model.parameters()} == {torch.bfloat16}
    for _ in range(2):
        assert one_update(shared).grad_norm == pytest.approx(one_update(plain).grad_norm, rel=1e-2)
    assert shared.fingerprint() == pytest.approx(plain.fingerprint(), rel=1e-3)


# Activation offload.


def test_offload_moves_the_input_of_each_layer_and_little_else(tiny_model, monkeypatch):
    moved, really = [], logprobs._to_cpu
    monkeypatch.setattr(logprobs, "_to_cpu", lambda tensor: moved.append(really(tensor)) or moved[-1])
    policy = make_policy(tiny_model, " ".join(OFFLOADED))
    policy.engine.train()
    batch = to_tensors(ROWS, 0)
    policy.score(batch)
    tokens = batch.tree.line_N.numel()
    inputs = [kept.tensor for kept in moved if kept.tensor.shape == (1, tokens, 32)]
    assert len({tensor.data_ptr() for tensor in inputs}) == len(inputs), "copies"
    assert 2 <= len(inputs) <= 4, "of two layers, and of the last norm"
    large = sum(kept.tensor.numel() for kept in moved if not isinstance(kept.tensor, torch.nn.Parameter))
    assert large <= 5 * inputs[0].numel()


def test_offload_keeps_nothing_while_it_only_measures(tiny_model, monkeypatch):
    moved, really = [], logprobs._to_cpu
    monkeypatch.setattr(logprobs, "_to_cpu", lambda tensor: moved.append(tensor) or really(tensor))
    make_policy(tiny_model, " ".join(OFFLOADED)).measure(to_tensors(ROWS, 0))
    assert moved == []


# fp16.


def test_fp16_is_asked_of_the_engine_where_the_model_has_it():
    for name in ("zero2", "zero2_offload", "zero3", "zero3_offload"):
        filled = ds_config.fill(ds_config.read(name), "fp16", 1.0, trained=10)
        assert (filled["fp16"], filled["bf16"]) == ({"enabled": True}, {"enabled": False})


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


def one_update(policy):
    algorithm, packer = policy.config.algorithm, Packer(10_000, 0, policy.is_flat)
    (batch,) = minibatches(groups_of(ROWS, algorithm.aggregation), IDLE, policy.config, packer)
    return update(policy, lambda: backward(policy, batch, policy.config, 0.0, Tally()), 0, policy.config)


# Bad input.


@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        (["model.quantize=nf5"], r"model.quantize='nf5' cannot be used. Write one of 'none', 'nf4' or 'int8'"),
        (["model.attention=flex"], r"model.attention='flex' cannot be used. Write one of 'auto', 'sdpa', 'flash' or"),
        (["model.quantize=nf4", "lora.enabled=false"], r"model.quantize=nf4: .* Write lora.enabled=true, or model.q"),
        (["model.quantize=int8", "lora.init=pissa"], r"lora.init=pissa: .* Write lora.init=zero, or model.quantize="),
        (["model.quantize=int8", "lora.dora=true"], r"lora.dora=true: .* Write model.quantize=nf4, or lora.dora=fal"),
        (["model.activation_offload=true"], r"model: activation_offload=true .* Write model.gradient_checkpointing=t"),
    ],
)
def test_settings_that_cannot_be(chosen, told):
    with pytest.raises(ConfigError, match=told):
        resolve("nano", None, chosen)


@pytest.mark.parametrize(
    ("chosen", "has_gpu", "told"),
    [
        (["engine.ds_config=zero3", "lora.dora=true"], True, r"splits the weights .* or lora.dora=false"),
        (["engine.ds_config=zero3", "lora.targets=[q_proj, lm_head]"], True, r"names lm_head, .* or lora.targets=all"),
        (["engine.ds_config=zero3_offload", "model.quantize=nf4"], True, r"nf4 cannot be split.*=zero2_offload"),
        (
            ["engine.ds_config=zero3_offload", *FULL, "algorithm.gradreg.strength=0.01"],
            True,
            r"algorithm.gradreg takes gradients .* or algorithm.gradreg.strength=0",
        ),
        (["model.attention=flash"], False, r"model.attention=flash: it needs a card.* Write model.attention=auto"),
        (["model.attention=flash", "model.dtype=fp32"], True, r"computes in bf16 or fp16. Write model.dtype=auto"),
    ],
)
def test_levers_that_do_not_go_together_are_refused_before_anything_loads(chosen, has_gpu, told):
    with pytest.raises(ConfigError, match=told):
        ds_config.check(resolve("nano", None, chosen), has_gpu)


def test_flash_attention_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    with pytest.raises(ConfigError, match=r"the package flash_attn is not installed. Write model.attention=auto"):
        ds_config.check(resolve("nano", None, ["model.attention=flash"]), has_gpu=True)


def test_what_goes_together_is_not_refused():
    split = ["engine.ds_config=zero3", *OFFLOADED]
    for chosen in (["model.quantize=nf4", *OFFLOADED], split, [*split, *FULL], [*split, "lora.init=pissa"]):
        ds_config.check(resolve("nano", None, chosen), has_gpu=True)


def test_a_model_that_is_quantised_on_disk_is_refused_before_its_weights_are_read(tiny_model, tmp_path):
    config = json.loads((tiny_model / "config.json").read_text())
    found = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": found}))
    with pytest.raises(ModelError, match=r"it is quantised already \(bitsandbytes\).* Name the model that it was made"):
        base(tmp_path)


# The program as a person runs it.

FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.steps=2", "run.save_every=1", "algorithm.loss=reinforce", "reward.weights={length: 1.0}"]
FEW += ["reward.length_band=[1, 30]"]


def train(folder, *arguments: str, ranks: int = 1) -> str:
    """Start the ranks as the launcher does, and return the output of rank 0."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    if ranks > 1:
        own |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hardware.free_port())}
    started = [
        subprocess.Popen(
            [*forked(), str(ROOT / "train.py"), *arguments],
            cwd=folder,
            env=own | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=240) for process in started]
    assert [(process.returncode, complained) for process, (_, complained) in zip(started, said)] == [(0, "")] * ranks
    return said[0][0]


def do_the_last_step_again(folder, ranks: int = 1) -> str:
    """Leave a run as a crash in the second of two steps does."""
    for path in ("checkpoints/latest", "eval.json"):
        (folder / path).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints/step_000002")
    return train(folder.parent, "--resume", str(folder), "run.merge=false", "eval.problems=0", ranks=ranks)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    said = train(folder, "--preset", "nano", *FEW, "model.quantize=nf4", "run.dir=it", "eval.problems=8")
    return folder / "it", said


def test_a_job_over_a_4_bit_base_says_what_it_compares(job):
    folder, said = job
    assert "engine zero2_offload, base in nf4" in said
    assert "merged against trained (clean base against nf4 base): " in said
    assert "--samples 8 model.quantize=nf4" in said
    assert "warn" not in said.lower()
    assert "quantization_config" not in json.loads((folder / "merged/config.json").read_text())
    assert json.loads((folder / "eval.json").read_text())["settings"]["quantize"] == "nf4"


@pytest.mark.parametrize(("chosen", "alike"), [((), "merged"), (("model.quantize=nf4",), "trained")])
def test_an_adapter_is_evaluated_over_the_clean_base_unless_another_is_asked_for(
    job, tmp_path, monkeypatch, capsys, chosen, alike
):
    """The run evaluated its adapter over 4 bits, and merged it into the clean base."""
    monkeypatch.chdir(job[0].parent)
    with pytest.raises(SystemExit) as status:
        cli.main(["eval", "--adapter", "it/adapter", "--out", str(tmp_path / "out"), "--json", *chosen])
    assert status.value.code == 0
    lengths = answers(tmp_path / "out", "adapter")
    assert lengths == answers(job[0], alike)
    capsys.readouterr()


def answers(folder, model: str) -> list[str]:
    records = [json.loads(line) for line in (folder / "eval_answers.jsonl").read_text().splitlines()]
    return [record["completion"] for record in records if record["model"] == model]


def test_a_job_over_a_4_bit_base_resumes_byte_for_byte(job):
    folder = job[0]
    before = (folder / "adapter/adapter_model.safetensors").read_bytes()
    assert "going on after step 1" in do_the_last_step_again(folder)
    assert (folder / "adapter/adapter_model.safetensors").read_bytes() == before


@pytest.fixture(scope="module")
def split_jobs(splits, tmp_path_factory):
    """Every phase with two ranks, of which each does other work: base, rollout, reference, evaluation, export."""
    found = {}
    for name, chosen in {"whole": FULL, "adapter": ("eval.every=1",)}.items():
        folder = tmp_path_factory.mktemp("split")
        engine = splits["zero3" if name == "adapter" else "zero3_offload"]
        more = [*chosen, f"engine.ds_config={engine}", "algorithm.kl.coef=0.1", "eval.problems=7"]
        found[name] = folder / "it", train(folder, "--preset", "nano", *FEW, *more, "run.dir=it", ranks=2)
        assert "answers on 2 x cpu, engine" in found[name][1]
        assert "warn" not in found[name][1].lower()
    return found


def test_a_whole_model_is_trained_and_exported_by_two_ranks_that_share_it(split_jobs):
    folder, _ = split_jobs["whole"]
    original = read(ROOT / "trainer/model/nano").state_dict()
    trained = read(folder / "model").state_dict()
    assert [value.shape for value in trained.values()] == [value.shape for value in original.values()]
    assert any(not torch.equal(value, original[name]) for name, value in trained.items())


def test_an_adapter_is_trained_exported_and_merged_by_two_ranks_that_share_its_base(split_jobs):
    folder, said = split_jobs["adapter"]
    original = logits(read(ROOT / "trainer/model/nano"))
    last = logits(lora.load_adapter(read(ROOT / "trainer/model/nano"), folder / "adapter"))
    assert (last - original).abs().max() > 1e-3
    assert_close(logits(read(folder / "merged")), last, 1e-5)
    saved = folder / "checkpoints/step_000002/adapter/adapter_model.safetensors"
    assert saved.read_bytes() == (folder / "adapter/adapter_model.safetensors").read_bytes()
    assert (logits(lora.load_adapter(read(ROOT / "trainer/model/nano"), folder / "best")) - original).abs().max() > 1e-4
    assert "merged against trained: 7 of 7 greedy answers identical" in said


@pytest.mark.slow
@pytest.mark.parametrize("what", ["adapter", "whole"])
def test_two_ranks_that_share_a_model_resume_byte_for_byte(split_jobs, what):
    folder = split_jobs[what][0]
    result = folder / ("model/model.safetensors" if what == "whole" else "adapter/adapter_model.safetensors")
    before = result.read_bytes()
    assert "going on after step 1" in do_the_last_step_again(folder, ranks=2)
    assert result.read_bytes() == before


def test_an_unknown_quantisation_ends_with_status_2(tmp_path):
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "nano", "model.quantize=fp4"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert answer.stderr == "octet: model.quantize='fp4' cannot be used. Write one of 'none', 'nf4' or 'int8'.\n"


def test_the_check_of_settings_reads_the_engines_file(tmp_path):
    """A file of the user's own is ZeRO-3 by what it says, not by its name."""
    (tmp_path / "mine.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    mine = Case("one", [1], ds_config=str(tmp_path / "mine.json"), settings=["lora.dora=true"])
    with pytest.raises(ConfigError, match=r"mine.json splits the weights over the ranks"):
        ds_config.check(settings("nano", mine), has_gpu=True)
