"""train(): problem -> rollout -> reward -> advantage -> batch -> loss -> step, in this order.

Where this GRPO departs from the paper (Shao et al. 2024), and why:

1. The loss is a sum over tokens divided by the tokens of the step, over all micro-batches and ranks. The paper takes a
   mean for each answer first, which favours short right answers and long wrong ones.
2. Groups whose rewards are all the same are dropped. Their gradient is zero; what changes is the mean, which is over
   the tokens that are left. `rollout.dead_groups=keep` has the paper's.
3. One update for each batch of answers, so the ratio is exactly 1 in value and only its gradient counts.
4. No KL term and no reference model: the adapter is small and the run is short.
5. The temperature divides the logits in training as it does in sampling: otherwise the ratio is not 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer import checkpoints, distributed
from trainer.batches import idle_row, pack, rows_of
from trainer.config import Config
from trainer.course import Course, describe, metrics_of
from trainer.evaluate import Evaluation, evaluate
from trainer.logprobs import Scores
from trainer.losses import LOSSES, PolicyTerms, total
from trainer.rewards.scorer import Scorer
from trainer.rollouts import Sampler, collect
from trainer.tasks.curriculum import Curriculum, solve_rates
from trainer.tasks.prompts import Prompter
from trainer.types import Problem, Prompt, Sampling, ScoredGroup, TrainingBatch
from trainer.watch.health import Health
from trainer.watch.journal import Journal
from trainer.watch.live import Screen
from trainer.watch.metrics import Phases, Tally, tally_batch, tally_groups


class Update(Protocol):
    """What one update was like."""

    @property
    def grad_norm(self) -> float: ...

    @property
    def lr(self) -> float: ...

    @property
    def skipped(self) -> bool: ...


class Policy(Protocol):
    """What the loop needs of the thing that learns."""

    @property
    def bad_updates_allowed(self) -> int:
        """Updates in a row that may be skipped for a gradient that is not finite."""

    def score(self, batch: TrainingBatch) -> Scores: ...

    def backward(self, loss: Any) -> None: ...

    def update(self, gradient: Callable[[], None], step: int) -> Update: ...

    def fingerprint(self) -> float: ...

    def as_base(self) -> AbstractContextManager[None]: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run is made of, put together by `assemble.py`."""

    config: Config
    folder: Path
    device: Any
    pad_token: int
    problems: Sequence[Problem]
    curriculum: Curriculum
    held_out: Sequence[Prompt]
    prompter: Prompter
    sampler: Sampler
    scorer: Scorer
    policy: Policy
    journal: Journal | None  # on rank 0
    screen: Screen
    course: Course
    first_step: int
    total_steps: int

    def prompts_of(self, step: int) -> list[Prompt]:
        return [self.prompter.prompt(problem) for problem in distributed.mine(self.curriculum.draw(step))]

    def observe(self, groups: Sequence[ScoredGroup]) -> None:
        """Tell the curriculum how every rank did, so that all of them go on drawing the same problems."""
        for rates in distributed.gather(solve_rates(groups, self.config.reward.answer == "lenient")):
            self.curriculum.observe(rates)

    def sampling_of(self, step: int) -> Sampling:
        """Seeds differ by run, step and rank, and follow from them: a resumed run samples what it would have."""
        seed = (self.config.run.seed * 1_000_003 + step) * 4_099 + distributed.rank()
        rollout = self.config.rollout
        return Sampling(rollout.group_size, rollout.temperature, rollout.max_new_tokens, seed)

    def evaluate(self, name: str) -> Evaluation:
        return evaluate(name, self.sampler, self.scorer.verifier(), self.held_out, self.config.rollout.max_new_tokens)


def train(parts: Parts) -> None:
    settings = parts.config
    health = Health(parts.folder, distributed.rank(), parts.policy, fresh=parts.first_step == 0)
    parts.screen.start()
    for step in range(parts.first_step, parts.total_steps):
        if parts.course.has_stopped_rising:
            break
        tally, phases = Tally(), Phases()
        with phases("problem"):
            prompts = parts.prompts_of(step)
        with phases("rollout"):  # the reward is computed beside it
            groups = collect(parts.sampler, parts.scorer, prompts, parts.sampling_of(step))
            parts.observe(groups)
        with phases("batch"):  # with the advantages in it
            rows = rows_of(worth_training_on(groups, settings), settings.algorithm.advantage)
            batches = pack(rows or [idle_row(groups[0])], settings.optim.tokens_per_micro_batch, parts.pad_token)
            tokens = distributed.total(sum(len(row.completion) for row in rows))
        with phases("step"):
            compute = partial(gradient, parts, batches, tokens, tally if rows else Tally())
            update = parts.policy.update(compute, step) if tokens else None
        health.check(step + 1, update, rows)
        record(parts, step + 1, groups, update, tally, phases)


def worth_training_on(groups: Sequence[ScoredGroup], settings: Config) -> list[ScoredGroup]:
    return [group for group in groups if settings.rollout.dead_groups == "keep" or not group.is_dead]


def gradient(parts: Parts, batches: Sequence[TrainingBatch], tokens: float, tally: Tally) -> None:
    """The gradient of the step's loss, micro-batch by micro-batch. `tokens` are those of all ranks."""
    algorithm = parts.config.algorithm
    for batch in (batch.to(parts.device) for batch in batches):
        scores = parts.policy.score(batch)
        terms = PolicyTerms(scores.logprobs_BT, scores.logprobs_BT.detach(), batch.advantages_B)
        loss_BT = LOSSES[algorithm.loss](terms, algorithm)
        parts.policy.backward(total(loss_BT, batch.mask_BT, tokens))
        tally_batch(tally, batch, scores, loss_BT.detach())


def record(
    parts: Parts, step: int, groups: Sequence[ScoredGroup], update: Update | None, tally: Tally, phases: Phases
) -> None:
    """Write the step down, and do what is due after it: an evaluation, a checkpoint."""
    course, evaluation = parts.course, None
    if course.is_due(step, parts.total_steps):
        with phases("evaluation"):
            evaluation = parts.evaluate(f"step {step}")
    is_best = evaluation is not None and course.add(step, evaluation)
    tally_groups(tally, groups)
    tally.merge(parts.scorer.measured())
    metrics = tally.means(distributed.gather)
    if update is not None:
        metrics |= {"lr": update.lr, "skipped": float(update.skipped)}
        metrics |= {} if update.skipped else {"grad_norm": update.grad_norm}
    metrics |= {f"time/{name}": seconds for name, seconds in phases.seconds.items()}
    metrics |= metrics_of(evaluation) if evaluation else {}
    if parts.journal:
        parts.journal.metrics(step, metrics)
        parts.journal.samples(step, groups)
    parts.screen.step(step, metrics)
    if evaluation:
        parts.screen.say(f"after step {step}: {describe(evaluation)}{', the best so far' if is_best else ''}")
    if is_best and distributed.is_main():
        course.keep(parts.policy.export)
    run, last = parts.config.run, step == parts.total_steps or course.has_stopped_rising
    if last or is_best or step % run.save_every == 0:  # with a new best, so that no run resumes before its best
        checkpoints.save(parts.policy, parts.folder, step, run.keep, parts.curriculum)
