"""The real DeepSpeed engine: one gradient however the rows are dealt, equal to plain PyTorch, equal to what it was."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.updates import ROWS, UPDATES, deterministic, make_model, settings

GOLDEN = ROOT / "tests/golden/one_step.json"
HOW_TO_DECIDE = (
    "The first update of a tiny model changed. If no file of the loss, the batch, the advantage or the engine changed "
    "on purpose, it is a bug. If the mathematics was meant to change, `python -m tests.golden.remake` writes the new "
    "numbers; commit them with the change, with a line under *Numerics* in the CHANGELOG and curves that show it."
)

FULL = "lora.enabled=false algorithm.lr=0.001"  # so that 3e-5 is a small share of a step
VARIANTS = {
    "full": FULL,
    "dora": "lora.dora=true",
    "plus": "lora.plus_ratio=8",
    "pissa": "lora.init=pissa lora.rslora=true",
    "pissa_dora": "lora.init=pissa_niter_16 lora.dora=true",
}
RATES = {
    "linear": "optim.schedule=linear optim.warmup=0.34",
    "cosine": "optim.schedule=cosine optim.warmup=0.34 lora.plus_ratio=8",
}
CLIPPED = {norm: f"{FULL} optim.max_grad_norm={norm}" for norm in ("1.0", "0.1")}


def launch(model, out, world: int, *cases: str) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "tests.e2e.updates", str(model), str(out), *cases]
    shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * world
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def one_rank(tiny_model, tmp_path_factory):
    cases = ["whole:zero2_offload:10000:8", "pieces:zero2_offload:30:8", "rows:zero2_offload:1:8", "kept:zero2:30:8"]
    cases += [f"{name}:zero2_offload:10000:8:{more}" for name, more in (VARIANTS | RATES | CLIPPED).items()]
    cases += [f"{name}_pieces:zero2:30:8:{more}" for name, more in VARIANTS.items()]
    cases += ["adamw_8bit:zero2_offload:30:8:optim.name=adamw_8bit"]
    return launch(tiny_model, tmp_path_factory.mktemp("one") / "out.json", 1, *cases)


@pytest.fixture(scope="module")
def two_ranks(tiny_model, tmp_path_factory):
    cases = ["even:zero2_offload:10000:4,4", "uneven:zero2_offload:1:6,2", "idle:zero2_offload:30:8,0"]
    cases += ["kept:zero2:30:3,5"]
    cases += [f"{name}:zero2_offload:30:3,5:{more}" for name, more in VARIANTS.items()]
    return launch(tiny_model, tmp_path_factory.mktemp("two") / "out.json", 2, *cases)


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    assert other["loss"] == pytest.approx(one["loss"], abs=tolerance)
    assert other["grad_norms"] == pytest.approx(one["grad_norms"], abs=tolerance)
    for name, values in one["trained"].items():
        torch.testing.assert_close(torch.tensor(other["trained"][name]), torch.tensor(values), atol=tolerance, rtol=0)


@pytest.mark.parametrize("case", ["pieces", "rows", "kept"])
def test_micro_batches_and_offload_change_nothing(one_rank, case):
    assert_same(one_rank["whole"], one_rank[case], tolerance=1e-5)


@pytest.mark.parametrize("case", ["even", "uneven", "idle", "kept"])
def test_two_ranks_give_the_update_of_one(one_rank, two_ranks, case):
    assert_same(one_rank["whole"], two_ranks[case], tolerance=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_one_update_however_the_rows_are_dealt(one_rank, two_ranks, variant):
    tolerance = 3e-5
    assert_same(one_rank[variant], one_rank[f"{variant}_pieces"], tolerance)
    assert_same(one_rank[variant], two_ranks[variant], tolerance)


@pytest.mark.parametrize(
    ("case", "peaks", "shares"),
    [
        ("whole", [0.01], [1, 1, 1]),
        ("linear", [0.01], [1 / 2, 1, 1 / 2]),  # one step of warm-up, and two to fall
        ("cosine", [0.01, 0.08], [1 / 2, 1, 1 / 2]),
        ("plus", [0.01, 0.08], [1, 1, 1]),
    ],
)
def test_the_rate_of_each_group_is_read_back_from_the_optimizer(one_rank, case, peaks, shares):
    for rates, share in zip(one_rank[case]["rates"], shares, strict=True):
        assert rates == pytest.approx([peak * share for peak in peaks])
    assert one_rank[case]["lr"] == pytest.approx([peaks[0] * share for share in shares])


def test_8_bit_states_learn_nearly_what_32_bit_states_do(one_rank):
    """A step is up to 0.01; the first is the same, because nothing has been rounded yet."""
    norms = [one_rank[case]["grad_norms"] for case in ("adamw_8bit", "whole")]
    assert norms[0][:2] == pytest.approx(norms[1][:2], abs=1e-5)
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[0][2] != norms[1][2]


@pytest.mark.parametrize(
    ("case", "more"),
    [("whole", ""), ("plus", VARIANTS["plus"]), ("dora", VARIANTS["dora"]), ("full", FULL), *CLIPPED.items()],
)
def test_the_engine_equals_plain_pytorch(one_rank, tiny_model, case, more):
    """No engine, no chunks, no padding: rows one by one, torch's AdamW and clipping."""
    config = settings(str(tiny_model), "zero2", *more.split())
    model = make_model(config)
    deterministic(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(groups(model, config), betas=config.optim.betas, weight_decay=0.0)
    norms = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        sum_of_losses(model, config.rollout.temperature).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, config.optim.max_grad_norm)))
        optimizer.step()
    trained = {name: value.flatten().tolist() for name, value in model.named_parameters() if value.requires_grad}
    assert norms == pytest.approx(one_rank[case]["grad_norms"], abs=1e-5, rel=1e-4)
    assert norms[0] > config.optim.max_grad_norm or case == "dora", "the clipping is part of what is compared"
    for name, values in trained.items():
        expected = torch.tensor(one_rank[case]["trained"][name])
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def groups(model, config) -> list[dict]:
    """LoRA+ by its definition: the B matrices learn faster."""
    rates = {True: config.algorithm.lr * config.lora.plus_ratio, False: config.algorithm.lr}
    named = list(model.named_parameters())
    return [
        {"params": [value for name, value in named if value.requires_grad and ("lora_B" in name) is fast], "lr": rate}
        for fast, rate in rates.items()
    ]


def sum_of_losses(model, temperature: float) -> torch.Tensor:
    losses, tokens = [], 0
    for one in ROWS:
        text = torch.tensor([[*one.prompt, *one.completion]])
        everything = torch.log_softmax(model(text).logits[0] / temperature, dim=-1)
        for position, token in enumerate(one.completion, start=len(one.prompt)):
            losses.append(-one.advantage * everything[position - 1, token])
            tokens += 1
    return torch.stack(losses).sum() / tokens


def test_golden_step(one_rank):
    golden, now = json.loads(GOLDEN.read_text()), summary(one_rank["whole"])
    for name, expected in golden.items():
        assert now[name] == pytest.approx(expected, rel=1e-4), f"{name}: {HOW_TO_DECIDE}"


def summary(result: dict) -> dict:
    values = torch.tensor([value for values in result["trained"].values() for value in values])
    return {
        "loss": result["loss"],
        "grad_norms": result["grad_norms"],
        "adapter_norm": float(values.norm()),
        "adapter_sum": float(values.sum()),
    }
