"""The real DeepSpeed engine: one gradient however the rows are dealt, equal to plain PyTorch, equal to what it was."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from tests.conftest import ROOT
from tests.e2e.updates import ROWS, UPDATES, Case, deterministic, settings

GOLDEN = ROOT / "tests/golden/one_step.json"
HOW_TO_DECIDE = (
    "The first update of a tiny model changed. If no file of the loss, the batch, the advantage or the engine changed "
    "on purpose, it is a bug. If the mathematics was meant to change, `python -m tests.golden.remake` writes the new "
    "numbers; commit them with the change, with a line under *Numerics* in the CHANGELOG and curves that show it."
)


RICH = (
    "algorithm.epochs=2",
    "algorithm.correction.level=token",
    "algorithm.kl.coef=0.1",
    "algorithm.kl.refresh=2",
    "algorithm.entropy_bonus=0.05",
    "algorithm.top_entropy=0.5",
    "algorithm.dual_clip=1.5",
    "algorithm.clip_high=0.05",
    "algorithm.clip_low=0.05",
)
EPS, STRENGTH = 0.01, 0.02
GRADREG = (f"algorithm.gradreg.strength={STRENGTH}", f"algorithm.gradreg.eps={EPS}", "optim.max_grad_norm=100")
OBJECTIVES = {
    "dapo": ("algorithm.aggregation=dapo",),
    "grpo": ("algorithm.aggregation=grpo", "algorithm.loss=gspo"),
    "bnpo": ("algorithm.aggregation=bnpo", "algorithm.loss=cispo"),
    "dr_grpo": ("algorithm.aggregation=dr_grpo", "algorithm.loss=reinforce_baseline"),
    "rich": RICH,
    "gradreg": GRADREG,
}


def cases(world: int) -> list[Case]:
    """Every objective in one piece, in pieces, backwards, and over two ranks evenly, unevenly and with one idle."""
    dealt = []
    for name, chosen in OBJECTIVES.items():
        if world == 1:
            dealt += [
                Case(f"{name} whole", [4], settings=chosen),
                Case(f"{name} pieces", [4], budget=30, ds_config="zero2", backwards=True, settings=chosen),
                Case(f"{name} rows", [4], budget=1, settings=chosen),
            ]
        else:
            dealt += [
                Case(f"{name} even", [2, 2], ds_config="zero2", settings=chosen),
                Case(f"{name} uneven", [3, 1], budget=1, settings=chosen),
                Case(f"{name} idle", [4, 0], budget=30, settings=chosen),
            ]
    return dealt


def launch(model, out, world: int, cases: list[Case]) -> dict:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    what = json.dumps([asdict(case) for case in cases])
    command = [sys.executable, "-m", "tests.e2e.updates", str(model), str(out), what]
    shared = os.environ | {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * world
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def one_rank(tiny_model, tmp_path_factory):
    return launch(tiny_model, tmp_path_factory.mktemp("one") / "out.json", 1, cases(1))


@pytest.fixture(scope="module")
def two_ranks(tiny_model, tmp_path_factory):
    return launch(tiny_model, tmp_path_factory.mktemp("two") / "out.json", 2, cases(2))


def assert_same(one: dict, other: dict, tolerance: float) -> None:
    assert other["loss"] == pytest.approx(one["loss"], abs=tolerance)
    assert other["grad_norms"] == pytest.approx(one["grad_norms"], abs=tolerance)
    for name, values in one["adapter"].items():
        torch.testing.assert_close(torch.tensor(other["adapter"][name]), torch.tensor(values), atol=tolerance, rtol=0)


@pytest.mark.parametrize("dealt", ["pieces", "rows"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_order_and_offload_change_nothing(one_rank, objective, dealt):
    assert_same(one_rank[f"{objective} whole"], one_rank[f"{objective} {dealt}"], tolerance=1e-5)


@pytest.mark.parametrize("dealt", ["even", "uneven", "idle"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_ranks_give_the_update_of_one(one_rank, two_ranks, objective, dealt):
    assert_same(one_rank[f"{objective} whole"], two_ranks[f"{objective} {dealt}"], tolerance=1e-5)


def test_objectives_differ(one_rank):
    """So that what is the same above is not the same for another reason."""
    norms = [one_rank[f"{objective} whole"]["grad_norms"][0] for objective in OBJECTIVES]
    assert len({round(norm, 3) for norm in norms}) >= len(norms) - 1  # the first gradient of gradreg is that of dapo


def test_the_first_pass_is_on_policy_and_the_second_is_clipped(one_rank, two_ranks):
    for result in (one_rank["rich whole"], two_ranks["rich uneven"]):
        assert result["measured"][0]["kl"] > 0  # the second pass has moved away from the reference of the first
        assert result["measured"][0]["clipped/high"] > 0
    for measured in one_rank["dapo whole"]["measured"]:
        assert measured["ratio"] == measured["ratio/max"] == 1.0


@pytest.fixture
def plain(tiny_model):
    """The same adapter without an engine."""
    from trainer.policy.base import load_model
    from trainer.policy.lora import add_adapter

    config = settings(str(tiny_model), Case("plain", [4]))
    model = add_adapter(load_model(config.model, "fp32", torch.device("cpu")), config.lora)
    deterministic(model)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad], config


def test_the_engine_equals_plain_pytorch(one_rank, plain):
    """No engine, no chunks, no padding: rows one by one, torch's AdamW and clipping."""
    model, trainable, config = plain
    optimizer = torch.optim.AdamW(trainable, lr=config.algorithm.lr, betas=config.optim.betas, weight_decay=0.0)
    norms = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        sum_of_losses(model, config.rollout.temperature).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, config.optim.max_grad_norm)))
        optimizer.step()
    adapter = {name: value.flatten().tolist() for name, value in model.named_parameters() if value.requires_grad}
    assert norms == pytest.approx(one_rank["dapo whole"]["grad_norms"], abs=1e-5)
    assert norms[0] > config.optim.max_grad_norm, "the clipping is part of what is compared"
    for name, values in adapter.items():
        expected = torch.tensor(one_rank["dapo whole"]["adapter"][name])
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def test_gradient_regularisation_equals_plain_pytorch(one_rank, two_ranks, plain):
    """Two gradients of the ratio by autograd, the second with the weights moved by hand; the first update's norm."""
    model, trainable, config = plain
    old = completion_logprobs(model, config.rollout.temperature).detach()
    first = gradient_of_ratio(model, trainable, config, old)
    with torch.no_grad():
        for parameter, part in zip(trainable, first, strict=True):
            parameter.add_(part, alpha=EPS)
    second = gradient_of_ratio(model, trainable, config, old)
    mixed = [one + STRENGTH / EPS * (two - one) for one, two in zip(first, second, strict=True)]
    for result in (one_rank["gradreg whole"], two_ranks["gradreg uneven"]):
        assert result["grad_norms"][0] == pytest.approx(norm_of(mixed), rel=1e-4)
        assert result["updates"][0]["gradreg/first_norm"] == pytest.approx(norm_of(first), rel=1e-4)
        assert result["updates"][0]["gradreg/second_norm"] == pytest.approx(norm_of(second), rel=1e-4)
    assert abs(norm_of(mixed) / norm_of(first) - 1) > 1e-2, "the term is large enough to be seen"


def gradient_of_ratio(model, trainable, config, old) -> list[torch.Tensor]:
    ratio = (completion_logprobs(model, config.rollout.temperature) - old).exp()
    advantages = torch.tensor([one.advantage for one in ROWS for _ in one.completion])
    return list(torch.autograd.grad(-(ratio * advantages).mean(), trainable))


def norm_of(parts) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


def sum_of_losses(model, temperature: float) -> torch.Tensor:
    advantages = torch.tensor([one.advantage for one in ROWS for _ in one.completion])
    return -(completion_logprobs(model, temperature) * advantages).mean()


def completion_logprobs(model, temperature: float) -> torch.Tensor:
    """Of every completion token of every row, one row at a time."""
    logprobs = []
    for one in ROWS:
        everything = torch.log_softmax(
            model(torch.tensor([[*one.prompt, *one.completion]])).logits[0] / temperature, -1
        )
        for position, token in enumerate(one.completion, start=len(one.prompt)):
            logprobs.append(everything[position - 1, token])
    return torch.stack(logprobs)


def test_golden_step(one_rank):
    golden, now = json.loads(GOLDEN.read_text()), summary(one_rank["dapo whole"])
    for name, expected in golden.items():
        assert now[name] == pytest.approx(expected, rel=1e-4), f"{name}: {HOW_TO_DECIDE}"


def summary(result: dict) -> dict:
    values = torch.tensor([value for values in result["adapter"].values() for value in values])
    return {
        "loss": result["loss"],
        "grad_norms": result["grad_norms"],
        "adapter_norm": float(values.norm()),
        "adapter_sum": float(values.sum()),
    }
