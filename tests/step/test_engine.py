"""The real DeepSpeed engine: one gradient however the rows are dealt, equal to plain PyTorch, equal to what it was."""

import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.conftest import ROOT, Opens, logprobs_of, refuses
from tests.e2e.updates import ROWS, UPDATES, Case, deterministic, make_model, settings
from tests.run_on_ranks import start_ranks
from trainer.config.resolve import resolve
from trainer.errors import CheckpointError
from trainer.step import engine
from trainer.step.optimizer import parameter_groups

GOLDEN = ROOT / "tests/golden/one_step.json"
HOW_TO_DECIDE = (
    "The first update of a tiny model changed. If no file of the loss, the batch, the advantage or the engine changed "
    "on purpose, it is a bug. If the mathematics was meant to change, `python -m tests.golden.remake` writes the new "
    "numbers; commit them with the change, with a line under *Numerics* in the CHANGELOG and curves that show it."
)


RICH = ("algorithm.epochs=2", "algorithm.correction.level=token", "algorithm.kl.coef=0.1", "algorithm.kl.refresh=2")
RICH += ("algorithm.entropy_bonus=0.05", "algorithm.top_entropy=0.5", "algorithm.dual_clip=1.5")
RICH += ("algorithm.clip_high=0.05", "algorithm.clip_low=0.05")
EPS, STRENGTH = 0.01, 0.02
GRADREG = (f"algorithm.gradreg.strength={STRENGTH}", f"algorithm.gradreg.eps={EPS}", "optim.max_grad_norm=100")
LOSS_OF = {"grpo": "gspo", "bnpo": "cispo", "dr_grpo": "reinforce_baseline"}
OBJECTIVES = {name: (f"algorithm.aggregation={name}", f"algorithm.loss={loss}") for name, loss in LOSS_OF.items()}
OBJECTIVES |= {"dapo": ("algorithm.aggregation=dapo",), "rich": RICH, "gradreg": GRADREG}
OBJECTIVES |= {"minibatches": ("algorithm.minibatches=2", "algorithm.clip_high=0.05", "algorithm.lr=0.003")}
OBJECTIVES |= {"muon": ("optim.name=muon",)}
OBJECTIVES |= {"warmup": ("warmup.only=true", "warmup.steps=3", "warmup.lr=0.01", "optim.max_grad_norm=0.2")}
IDLE = ("rich", "gradreg", "muon", "minibatches")  # those whose ranks do more together than to add up one gradient
# Objective and the pass in which memory runs out -> the number of ranks, so that every two of the three meet.
SHORT = {("dapo", "forward"): 1, ("rich", "forward"): 2, ("gradreg", "forward"): 1}
SHORT |= {
    ("muon", "forward"): 2,
    ("muon", "backward"): 1,
    ("dapo", "backward"): 2,
    ("rich", "backward"): 1,
    ("gradreg", "backward"): 2,
}
FULL = ("lora.enabled=false", "algorithm.lr=0.001")  # so that 3e-5 is a small share of a step
VARIANTS = {"full": FULL, "dora": ("lora.dora=true",), "plus": ("lora.plus_ratio=8",)}
VARIANTS |= {"pissa": ("lora.init=pissa", "lora.rslora=true")}
VARIANTS |= {"pissa_dora": ("lora.init=pissa_niter_16", "lora.dora=true")}
RATES = {"linear": ("optim.schedule=linear", "optim.warmup=0.34")}
RATES |= {"cosine": ("optim.schedule=cosine", "optim.warmup=0.34", "lora.plus_ratio=8")}
CLIPPED = {f"clipped at {norm}": (*FULL, f"optim.max_grad_norm={norm}") for norm in (1.0, 0.1)}
EIGHT_BITS = {"adamw_8bit": ("optim.name=adamw_8bit", "engine.ds_config=zero2")}


ADVANTAGES = torch.tensor([one.advantage for one in ROWS for _ in one.completion])  # of each token


def cases(world: int) -> list[Case]:
    """Every objective in one piece, in pieces and backwards, and over two ranks unevenly; some with one rank idle."""
    zero2: dict = {"ds_config": "zero2"}
    ways = {"whole": {"groups": [4]}, "pieces": {"groups": [4], "budget": 30, "backwards": True, **zero2}}
    if world == 2:
        ways = {"uneven": {"groups": [3, 1], "budget": 1, **zero2}, "idle": {"groups": [4, 0], "budget": 30}}
    dealt = []
    for name, chosen in OBJECTIVES.items():
        taken = [way for way in ways if way != "idle" or name in IDLE]
        dealt += [Case(f"{name} {way}", settings=chosen, **ways[way]) for way in taken]
    for (name, breaks), ranks in SHORT.items():
        if ranks == world:
            short: dict = {"memory": [16, None], "breaks": breaks}  # the first rank has less
            short["ds_config"] = "zero2_offload" if breaks == "forward" else "zero2"
            if world == 2 and name in ("muon", "gradreg"):  # their gradients need weights that are whole on every rank
                short["ds_config"] = "zero3"
            groups = [4] if world == 1 else [3, 1]
            dealt.append(Case(f"{name} short of memory, {breaks}", groups, settings=OBJECTIVES[name], **short))
    return dealt + variants(world)


def variants(world: int) -> list[Case]:
    if world == 2:
        return [Case(f"{name} uneven", [3, 1], budget=30, settings=chosen) for name, chosen in VARIANTS.items()]
    alone = VARIANTS | RATES | CLIPPED | EIGHT_BITS
    in_pieces: dict = {"budget": 30, "ds_config": "zero2"}
    pieces = [Case(f"{name} pieces", [4], settings=chosen, **in_pieces) for name, chosen in VARIANTS.items()]
    return pieces + [Case(f"{name} whole", [4], settings=chosen) for name, chosen in alone.items()]


def launch(model, out, world: int, cases: list[Case]) -> dict:
    start_ranks(world, "-m", "tests.e2e.updates", model, out, json.dumps([asdict(case) for case in cases]))
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


DEALT = [*product(OBJECTIVES, ["pieces", "uneven"]), *product(IDLE, ["idle"])]


@pytest.mark.parametrize(("objective", "dealt"), DEALT)
def test_micro_batches_order_offload_and_ranks_change_nothing(one_rank, two_ranks, objective, dealt):
    found = (one_rank | two_ranks)[f"{objective} {dealt}"]
    assert_same(one_rank[f"{objective} whole"], found, tolerance=1e-5)


@pytest.mark.parametrize(("objective", "breaks"), SHORT)
def test_out_of_memory_goes_on_in_smaller_pieces_to_the_same_update(one_rank, two_ranks, objective, breaks):
    """In the middle of the forward pass, or of the backward pass, which leaves a part of its gradient behind."""
    whole, found = one_rank[f"{objective} whole"], (one_rank | two_ranks)[f"{objective} short of memory, {breaks}"]
    assert_same(whole, found, tolerance=1e-5)
    assert "out of memory" in found["told"][0]
    assert 1 < len(found["told"]) < 5  # what fits is remembered from step to step
    for seen, expected in zip(found["measured"], whole["measured"], strict=True):
        assert seen == pytest.approx(expected, abs=1e-5)  # nothing is counted twice


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_one_update_however_the_rows_are_dealt(one_rank, two_ranks, variant):
    whole, tolerance = one_rank[f"{variant} whole"], 3e-5
    assert_same(whole, one_rank[f"{variant} pieces"], tolerance)
    assert_same(whole, two_ranks[f"{variant} uneven"], tolerance)


OF_STEPS = [("dapo", [0.01], [1, 1, 1]), ("plus", [0.01, 0.08], [1, 1, 1])]
OF_STEPS += [("linear", [0.01], [1 / 2, 1, 1 / 2])]  # one step of warm-up, and two to fall
OF_STEPS += [("cosine", [0.01, 0.08], [1 / 2, 1, 1 / 2])]


@pytest.mark.parametrize(("case", "peaks", "shares"), OF_STEPS)
def test_the_rate_of_each_group_is_read_back_from_the_optimizer(one_rank, case, peaks, shares):
    result = one_rank[f"{case} whole"]
    for rates, share in zip(result["rates"], shares, strict=True):
        assert rates == pytest.approx([peak * share for peak in peaks])
    assert result["lr"] == pytest.approx([peaks[0] * share for share in shares])


def test_8_bit_states_learn_nearly_what_32_bit_states_do(one_rank):
    """The first step is the same, because nothing has been rounded yet."""
    eight, full = (one_rank[f"{case} whole"]["grad_norms"] for case in ("adamw_8bit", "dapo"))
    assert eight[:2] == pytest.approx(full[:2], abs=1e-5)
    assert eight == pytest.approx(full, rel=1e-2)
    assert eight[2] != full[2]


def test_objectives_differ(one_rank):
    """So that what is the same above is not the same for another reason."""
    norms = [one_rank[f"{objective} whole"]["grad_norms"][0] for objective in OBJECTIVES]
    assert len({round(norm, 3) for norm in norms}) >= len(norms) - 2  # the first of gradreg and muon are that of dapo


def test_the_first_pass_is_on_policy_and_the_second_is_clipped(one_rank, two_ranks):
    for result in (one_rank["rich whole"], two_ranks["rich uneven"]):
        assert result["measured"][0]["kl"] > 0  # the second pass has moved away from the reference of the first
        assert result["measured"][0]["clipped/high"] > 0
    for measured in one_rank["dapo whole"]["measured"]:
        assert measured["ratio"] == measured["ratio/max"] == 1.0


def without_engine(tiny_model, *chosen: str):
    """The same model, what is trained of it, and its settings."""
    config = settings(str(tiny_model), Case("plain", [4], settings=chosen))
    model = make_model(config)
    deterministic(model)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad], config


PLAIN = {"dapo": (), "warmup": OBJECTIVES["warmup"], "plus": VARIANTS["plus"], "dora": VARIANTS["dora"], "full": FULL}
PLAIN |= CLIPPED


@pytest.mark.parametrize("case", PLAIN)
def test_the_engine_equals_plain_pytorch(one_rank, tiny_model, case):
    """No engine, no chunks, no padding: rows one by one, torch's AdamW and clipping."""
    model, trainable, config = without_engine(tiny_model, *PLAIN[case])
    optimizer = torch.optim.AdamW(groups(model, config), betas=config.optim.betas, weight_decay=0.0)
    norms = []
    for _ in range(UPDATES):
        optimizer.zero_grad()
        (-(completion_logprobs(model, config.rollout.temperature) * ADVANTAGES).mean()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, config.optim.max_grad_norm)))
        optimizer.step()
    adapter = {name: value.flatten().tolist() for name, value in model.named_parameters() if value.requires_grad}
    assert norms == pytest.approx(one_rank[f"{case} whole"]["grad_norms"], abs=1e-5, rel=1e-4)
    assert norms[0] > config.optim.max_grad_norm or case == "dora", "the clipping is part of what is compared"
    for name, values in adapter.items():
        expected = torch.tensor(one_rank[f"{case} whole"]["adapter"][name])
        torch.testing.assert_close(torch.tensor(values), expected, atol=1e-4, rtol=0)


def test_the_adapter_of_an_embedding_has_the_rates_of_lora_plus():
    kinds = ("embedding_A", "embedding_B", "B")
    named = [(f"lora_{kind}.default", torch.ones(1, requires_grad=True)) for kind in kinds]
    model, config = SimpleNamespace(named_parameters=lambda: named), resolve("nano", None, ["lora.plus_ratio=4"])
    assert [len(group["params"]) for group in parameter_groups(model, config)] == [1, 2]


def groups(model, config) -> list[dict]:
    """LoRA+ by its definition: the B matrices learn faster."""
    rates = {True: config.algorithm.lr * config.lora.plus_ratio, False: config.algorithm.lr}
    named = list(model.named_parameters())
    return [
        {"params": [value for name, value in named if value.requires_grad and ("lora_B" in name) is fast], "lr": rate}
        for fast, rate in rates.items()
    ]


def test_gradient_regularisation_equals_plain_pytorch(one_rank, two_ranks, tiny_model):
    """Two gradients of the ratio by autograd, the second with the weights moved by hand; the first update's norm."""
    model, trainable, config = without_engine(tiny_model)
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
        assert result["loss"] == pytest.approx(one_rank["dapo whole"]["loss"], abs=1e-5)  # of the first gradient alone
    assert abs(norm_of(mixed) / norm_of(first) - 1) > 1e-2, "the term is large enough to be seen"


def test_muon_equals_plain_pytorch(one_rank, tiny_model):
    """The gradients of plain PyTorch, and their singular vectors."""
    model, trainable, config = without_engine(tiny_model, *OBJECTIVES["muon"])
    norms = []
    for _ in range(UPDATES):
        loss = -(completion_logprobs(model, config.rollout.temperature) * ADVANTAGES).mean()
        gradient = torch.autograd.grad(loss, trainable)
        norms.append(norm_of(gradient))
        with torch.no_grad():
            for parameter, part in zip(trainable, gradient, strict=True):
                left, values, right = torch.linalg.svd(part.double(), full_matrices=False)
                values = values / (values.square() + (0.03 * values.max()) ** 2).clamp(min=1e-30).sqrt()
                parameter.sub_(config.algorithm.lr * max(part.shape) ** 0.5 * (left * values) @ right)
    assert norms == pytest.approx(one_rank["muon whole"]["grad_norms"], rel=1e-3)
    for name, values in model.named_parameters():
        if values.requires_grad:
            found = torch.tensor(one_rank["muon whole"]["adapter"][name])
            torch.testing.assert_close(found, values.detach().flatten(), atol=1e-4, rtol=0)


def gradient_of_ratio(model, trainable, config, old) -> list[torch.Tensor]:
    ratio = (completion_logprobs(model, config.rollout.temperature) - old).exp()
    return list(torch.autograd.grad(-(ratio * ADVANTAGES).mean(), trainable))


def norm_of(parts) -> float:
    return float(torch.cat([part.flatten() for part in parts]).norm())


def completion_logprobs(model, temperature: float) -> torch.Tensor:
    return torch.cat([logprobs_of(model, one.prompt, one.completion, temperature) for one in ROWS])


def test_golden_step(one_rank):
    golden, now = json.loads(GOLDEN.read_text()), summary(one_rank["dapo whole"])
    for name, expected in golden.items():
        assert now[name] == pytest.approx(expected, rel=1e-4), f"{name}: {HOW_TO_DECIDE}"


def summary(result: dict) -> dict:
    values = torch.tensor([value for values in result["adapter"].values() for value in values])
    own = {"loss": result["loss"], "grad_norms": result["grad_norms"]}
    return own | {"adapter_norm": float(values.norm()), "adapter_sum": float(values.sum())}


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_calls_a_function_is_refused_and_not_run(tmp_path, zipped):
    path, opened = tmp_path / "optim_states.pt", tmp_path / "opened"
    torch.save({"optimizer": torch.ones(2), "client": Opens(opened)}, path, _use_new_zipfile_serialization=zipped)
    with refuses(path, CheckpointError, names="posix.mkdir"):
        engine._load_without_code(str(path))
    assert not opened.exists()


def test_what_deepspeed_saves_is_read(tmp_path):
    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2)
    torch.save({"loss_scaler": scaler, "zero_stage": ZeroStageEnum(2)}, tmp_path / "states.pt")
    read = engine._load_without_code(str(tmp_path / "states.pt"))
    assert (read["loss_scaler"].cur_scale, read["zero_stage"]) == (2.0**16, ZeroStageEnum.gradients)
