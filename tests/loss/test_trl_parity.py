"""Our objectives against TRL's: the same answers, one loss, one gradient, from a real GRPOTrainer.

The answers come from another policy, so ratios are clipped on both sides, and they are of uneven length; TRL pads
prompts on the left. Ours goes the way of a run: groups, rows, micro-batches, and the loop's own gradient. Where the two
differ by design:

- `epsilon_high` of TRL's CISPO is the cap itself, ours is 1 + clip_high; TRL's has no lower bound.
- TRL's `bnpo` is a mean over the tokens of a batch; ours over those of a group, and then over groups.
- TRL weighs the KL by the ratio, unless `use_bias_correction_kl` is off.
- TRL's entropy bonus is a mean over tokens always; ours follows the aggregation.
"""

import random
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.conftest import gradients, group, logprobs_of
from tests.e2e.updates import updater_of
from trainer import advantage
from trainer.batch.pack import idle_row, minibatches, rows
from trainer.config.resolve import resolve
from trainer.config.settings import Config
from trainer.loss.logprobs import LogProbs
from trainer.records import Completion, MeasuredBatch, ScoredGroup, Scores
from trainer.step.update import backward
from trainer.watch.tally import Tally

# TRL itself sets it by its old name
pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing:FutureWarning")

spoken = torch.no_grad()(logprobs_of)
PAD, TEMPERATURE, LONGEST, CAP = 0, 0.7, 12, 1.5
EVERY = slice(None)
SHAPES = [  # rewards, lengths, prompt
    ([1.0, 0.0, 0.25, 0.0], [3, 9, 1, LONGEST], (30, 31, 32, 33, 34)),
    ([0.0, 1.0, 1.0, 0.0], [7, 2, LONGEST, 5], (40, 41)),
]


class Case(NamedTuple):
    ours: str  # settings of the algorithm
    theirs: dict


def of_trl(loss_type: str, low: float = 0.2, high: float | None = None, **more) -> dict:
    return {"loss_type": loss_type, "epsilon": low, "epsilon_high": high, **more}


OF_GSPO = of_trl("grpo", 0.03, 0.04, importance_sampling_level="sequence")
CASES = {
    "grpo": Case("aggregation=grpo", of_trl("grpo")),
    "dr_grpo": Case("aggregation=dr_grpo advantage=dr_grpo", of_trl("dr_grpo")),
    "dapo": Case("clip_high=0.28", of_trl("dapo", 0.2, 0.28)),
    "gspo": Case("loss=gspo aggregation=grpo clip_low=0.03 clip_high=0.04", OF_GSPO),
    "cispo": Case("loss=cispo clip_low=1.0 clip_high=0.2", of_trl("cispo", high=1.2)),
    "clip higher": Case("clip_low=0.1 clip_high=0.3 aggregation=grpo", of_trl("grpo", 0.1, 0.3)),
    "dual clip": Case("dual_clip=1.3", of_trl("dapo", delta=1.3)),
    "top entropy": Case("top_entropy=0.5", of_trl("dapo", top_entropy_quantile=0.5)),
    "entropy bonus": Case("entropy_bonus=0.1", of_trl("dapo", entropy_coef=0.1)),
}


class Policies(NamedTuple):
    """Four of one family: each but the first has other weights, by a little."""

    flat: bool  # whether ours works on a line of tokens, or on padded rows
    now: torch.nn.Module
    old: torch.nn.Module
    reference: torch.nn.Module
    sampler: torch.nn.Module


@pytest.fixture(scope="module", params=[True, False], ids=["line", "rows"])
def policies(tiny_model, request) -> Policies:
    return Policies(request.param, *moved_apart(tiny_model, 0.015, 0.015, 0.015))


def moved_apart(folder, *scales: float) -> list[torch.nn.Module]:
    """Return a model, and copies that noise of these scales has moved away from it."""
    torch.manual_seed(1)
    now, *others = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in (0, *scales))
    with torch.no_grad():
        for model, scale in zip(others, scales, strict=True):
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn_like(parameter))
    return [now, *others]


@pytest.fixture(scope="module")
def groups(policies) -> list[ScoredGroup]:
    return answered(SHAPES, policies.sampler, TEMPERATURE)


def answered(shapes, sampler, temperature: float) -> list[ScoredGroup]:
    """Answers of random tokens, with the log-probs of the sampler."""
    draw, made = random.Random(0), []
    for rewards, lengths, prompt in shapes:
        answers = [tuple(draw.randrange(4, 400) for _ in range(length)) for length in lengths]
        said = [(answer, tuple(spoken(sampler, prompt, answer, temperature).tolist())) for answer in answers]
        completions = (Completion(*one, "", truncated=False) for one in said)
        made.append(replace(group(rewards, lengths, prompt), completions=tuple(completions)))
    return made


class Plain:
    """A policy as the loop sees it, without an engine. It notes its forward passes."""

    is_displaced = False

    def __init__(self, now, reference, config: Config, flat: bool = True) -> None:
        temperature, algorithm = config.rollout.temperature, config.algorithm
        self.now = LogProbs(now, temperature, bool(algorithm.entropy_bonus), flat)
        self.reference = LogProbs(reference, temperature, flat=flat)
        self.is_flat, self.is_reference = self.now.is_flat, False
        self.passes: list[str] = []

    def score(self, batch) -> Scores:
        self.passes.append("train")
        return self.now(batch)

    @torch.no_grad()
    def measure(self, batch) -> Scores:
        self.passes.append("reference" if self.is_reference else "policy")
        return (self.reference if self.is_reference else self.now)(batch)

    def backward(self, loss) -> None:
        loss.backward()

    def gathered(self):
        return nullcontext()

    @contextmanager
    def as_reference(self):
        self.is_reference = True
        yield
        self.is_reference = False


class Outcome(NamedTuple):
    loss: float
    gradient: dict[str, torch.Tensor]
    metrics: dict[str, float]


def settings(case: Case, groups, kl: float = 0.0, correction: str = "none") -> Config:
    sizes = [f"rollout.problems={len(groups)}", "rollout.group_size=4", f"rollout.max_new_tokens={LONGEST}"]
    sizes += ["optim.tokens_per_micro_batch=24", f"rollout.temperature={TEMPERATURE}"]
    objective = [f"algorithm.{setting}" for setting in case.ours.split()]
    objective += [f"algorithm.kl.coef={kl}", f"algorithm.correction={{level: {correction}, cap: {CAP}}}"]
    return resolve("nano", None, [*sizes, *objective])


def ours(policies: Policies, groups, config: Config) -> Outcome:
    """The update of a run: everything from `rows` to the gradient."""
    algorithm = config.algorithm
    policy = Plain(policies.now, policies.reference, config, policies.flat)
    assert policy.is_flat == policies.flat
    updater, before = updater_of(policy, config), LogProbs(policies.old, config.rollout.temperature, flat=policies.flat)
    groups = [replace(one, prompt=replace(one.prompt, place=place)) for place, one in enumerate(groups)]
    made = rows(groups, [advantage.of(one.rewards_G, algorithm) for one in groups], algorithm)
    (minibatch,) = updater.prepare(minibatches(made, idle_row(groups[0]), config, updater.packer))
    with torch.no_grad():
        old = [before(batch).logprobs_BT for batch in minibatch.batches]
    # some have old log-probs of the policy that is trained
    batches = [
        replace(batch, old_logprobs_BT=old_BT) if isinstance(batch, MeasuredBatch) else batch.measured(old_BT)
        for batch, old_BT in zip(minibatch.batches, old, strict=True)
    ]
    policies.now.zero_grad()
    tally = Tally()
    backward(policy, replace(minibatch, batches=batches), algorithm, algorithm.kl.coef, tally)
    assert len(batches) > 1, "several micro-batches are part of what is compared"
    metrics = tally.means(lambda sums: [sums])
    return Outcome(metrics["loss"], gradients(policies.now), metrics)


@pytest.fixture
def theirs(tiny_model, tokenizer, tmp_path):
    """TRL's loss of the inputs, with the options of its configuration."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    alike = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none", "num_generations": 4}
    alike |= {"max_completion_length": LONGEST, "temperature": TEMPERATURE, "use_bias_correction_kl": False}

    def outcome(inputs: dict, options: dict, corrected: bool = False) -> Outcome:
        rows = len(inputs["advantages"])
        trainer = GRPOTrainer(
            model=str(tiny_model),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(str(tmp_path), per_device_train_batch_size=rows, **alike, **options),
            train_dataset=Dataset.from_dict({"prompt": ["1"] * rows}),
            processing_class=tokenizer,
        )
        trainer.current_gradient_accumulation_steps = 1  # what `train` would have set
        trainer.use_vllm = corrected  # at this point it only says that the ratio to the sampler is a factor
        model = trainer.model.train()
        loss = trainer.compute_loss(model, inputs)
        loss.backward()
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        return Outcome(loss.item(), gradients(model), metrics)

    return outcome


@pytest.fixture(scope="module")
def rollouts(policies, groups) -> dict:
    """Return the inputs of TRL's trainer: prompts padded on the left, completions on the right."""
    answers = [(one.prompt.tokens, completion) for one in groups for completion in one.completions]
    prompts = [torch.tensor(prompt) for prompt, _ in answers]
    tokens = [torch.tensor(completion.tokens) for _, completion in answers]
    old, reference = (
        padded([spoken(model, prompt, completion.tokens, TEMPERATURE) for prompt, completion in answers])
        for model in (policies.old, policies.reference)
    )
    sampled = padded([torch.tensor(completion.logprobs) for _, completion in answers])
    return {
        "prompt_ids": padded(prompts, "left"),
        "prompt_mask": padded([torch.ones_like(one) for one in prompts], "left"),
        "completion_ids": padded(tokens),
        "completion_mask": padded([torch.ones_like(one) for one in tokens]),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": (old - sampled).exp().clamp(max=CAP),
    }


def padded(rows, side: str = "right") -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD, padding_side=side)


def inputs_of(rollouts: dict, groups, config: Config, rows: slice = EVERY) -> dict:
    """The chosen rows, with the advantages of these settings."""
    advantages = torch.tensor([value for one in groups for value in advantage.of(one.rewards_G, config.algorithm)])
    chosen = {name: values[rows] for name, values in rollouts.items()}
    return {**chosen, "advantages": advantages[rows], "num_items_in_batch": chosen["completion_mask"].sum()}


def assert_same(one: Outcome, loss: float, gradient: dict[str, torch.Tensor]) -> None:
    assert one.loss == pytest.approx(loss, abs=1e-5)
    assert one.gradient.keys() == gradient.keys()
    assert max(float(part.abs().max()) for part in one.gradient.values()) > 0.01, "there is something to compare"
    for name, part in one.gradient.items():
        torch.testing.assert_close(part, gradient[name], atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


LOGGED = {"entropy": "entropy", "kl": "kl"}
LOGGED |= {"clipped/low": "clip_ratio/low_mean", "clipped/high": "clip_ratio/high_mean"}


@pytest.mark.parametrize(("name", "kl"), [*((name, 0.3) for name in CASES), ("dapo", 0.0)])
def test_loss_gradient_and_metrics_are_those_of_trl(name, kl, policies, groups, rollouts, theirs):
    case = CASES[name]
    config = settings(case, groups, kl)
    mine, trl = ours(policies, groups, config), theirs(inputs_of(rollouts, groups, config), case.theirs | {"beta": kl})
    assert_same(mine, trl.loss, trl.gradient)
    if "importance_sampling_level" not in case.theirs:  # with one ratio per answer TRL takes the mean over answers
        for own, logged in LOGGED.items():
            assert logged not in trl.metrics or mine.metrics[own] == pytest.approx(trl.metrics[logged], abs=1e-5), own
    assert mine.metrics["clipped/high"] > 0, "the answers are off policy"
    assert mine.metrics["clipped/low"] > 0 or name == "cispo", "the answers are off policy"


def test_truncated_correction_is_a_factor_of_the_policy_term_alone(policies, groups, rollouts, theirs):
    config = settings(CASES["dapo"], groups, kl=0.3, correction="token")
    trl = theirs(inputs_of(rollouts, groups, config), CASES["dapo"].theirs | {"beta": 0.3}, corrected=True)
    mine = ours(policies, groups, config)
    assert_same(mine, trl.loss, trl.gradient)
    assert mine.metrics["sampler_ratio/corrected"] < mine.metrics["sampler_ratio/raw"], "the cap has acted"


def test_bnpo_is_the_mean_of_what_trl_gives_each_group(policies, groups, rollouts, theirs):
    config = settings(Case("aggregation=bnpo", {}), groups, kl=0.3)
    halves = (inputs_of(rollouts, groups, config, rows) for rows in (slice(0, 4), slice(4, 8)))
    each = [theirs(half, of_trl("bnpo", beta=0.3)) for half in halves]
    mean = {name: sum(one.gradient[name] for one in each) / 2 for name in each[0].gradient}
    assert_same(ours(policies, groups, config), sum(one.loss for one in each) / 2, mean)
