"""train(): problem -> rollout -> reward -> advantage -> batch -> loss -> step, in this order.

Where this GRPO departs from the paper (Shao et al. 2024), and why:

1. The loss is a sum over tokens divided by the tokens of the step, over all micro-batches and ranks. The paper takes a
   mean for each answer first, which favours short right answers and long wrong ones (`algorithm.aggregation=grpo`).
2. Groups whose rewards are all the same are dropped. Their gradient is zero; what changes is the mean, which is over
   the tokens that are left. `rollout.dead_groups=keep` has the paper's.
3. One update for each batch of answers, so the ratio is exactly 1 in value and only its gradient counts
   (`algorithm.epochs`, `algorithm.minibatches` make more).
4. No KL term and no reference model: the adapter is small and the run is short (`algorithm.kl.coef` has both).
5. The temperature divides the logits in training as it does in sampling: otherwise the ratio is not 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainer.advantage import deviation, scored
from trainer.batch.pack import Packer, all_rows, idle_row, rows_of
from trainer.batch.pack import minibatches as deal
from trainer.batch.room import Room
from trainer.config.settings import Algorithm, Config
from trainer.evaluation.best import Course, describe, metrics_of
from trainer.evaluation.evaluate import Evaluation, evaluate
from trainer.loss.before_update import Beforehand
from trainer.loss.kl import Coefficient
from trainer.loss.logprobs import Scores
from trainer.loss.metrics import tally_batch
from trainer.loss.objectives import objective, total
from trainer.machine.out_of_memory import until_it_fits
from trainer.problem.curriculum import Curriculum, solve_rates
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.ranks.stopping import Stopping
from trainer.records import MiniBatch, Problem, Prompt, Sampling, ScoredGroup, TrainingBatch
from trainer.reward.scorer import Scorer
from trainer.rollout.ahead import Ahead, Rollout
from trainer.rollout.collect import Sampler, collect, refill
from trainer.rollout.make import uses_vllm
from trainer.run_folder import checkpoints
from trainer.run_folder.checkpoints import Stateful
from trainer.run_folder.journal import Journal
from trainer.watch import memory_use
from trainer.watch.health import Health
from trainer.watch.screen import Screen
from trainer.watch.tally import Measured, Phases, Tally, metrics_of_updates, tally_groups


class Policy(Protocol):
    """What the loop needs of the thing that learns."""

    @property
    def bad_updates_allowed(self) -> int:
        """Updates in a row that may be skipped for a gradient that is not finite."""

    def score(self, batch: TrainingBatch) -> Scores: ...

    def backward(self, loss: Any) -> None: ...

    def measure(self, batch: TrainingBatch) -> Scores: ...

    @property
    def is_displaced(self) -> bool:
        """The weights are not the policy's for the moment, so what is scored is not to be logged."""

    def update(self, gradient: Callable[[], None], step: int) -> Measured: ...

    def rehearse(self, gradient: Callable[[], None]) -> None:
        """All of an update but its step: nothing has changed afterwards."""

    def start_over(self) -> None: ...

    def fingerprint(self) -> float: ...

    def as_base(self) -> AbstractContextManager[None]: ...

    def as_reference(self) -> AbstractContextManager[None]: ...

    def gathered(self) -> AbstractContextManager[None]:
        """All weights are on every rank, for work that differs from rank to rank."""

    def refresh_reference(self, step: int) -> None: ...

    def release(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run is made of, put together by `assemble.py`."""

    config: Config
    folder: Path
    device: Any
    packer: Packer
    problems: Sequence[Problem]
    curriculum: Curriculum
    kl: Coefficient
    longest: Prompt  # of the training problems
    held_out: Sequence[Prompt]
    prompter: Prompter
    sampler: Sampler
    evaluator: Sampler  # the same without shortcuts, so that a merged model is compared with the adapter as it is
    scorer: Scorer
    policy: Policy
    journal: Journal | None  # on rank 0
    screen: Screen
    course: Course
    stopping: Stopping
    first_step: int
    total_steps: int
    ahead: Ahead = field(default_factory=Ahead)

    @property
    def room(self) -> Room:
        return Room(self.policy, (self.sampler, self.evaluator), self.packer, self.screen.warn)

    @property
    def beforehand(self) -> Beforehand:
        return Beforehand(self.policy, self.config, self.device, self.packer, self.room)

    @property
    def learned(self) -> dict[str, Stateful]:
        """What a resumed run has to know beside the policy."""
        return {"curriculum": self.curriculum, "kl": self.kl}

    def prompts_of(self, step: int) -> list[Prompt]:
        return [self.prompter.prompt(problem) for problem in distributed.mine(self.curriculum.draw(step))]

    def roll_out(self, prompts: Sequence[Prompt], step: int, tally: Tally) -> list[ScoredGroup]:
        """The scored groups of a step. With `rollout.ahead` they may be there, and those of the next one are begun."""
        groups, measured = self.ahead.take(step) or self._sampled(self.sampler, prompts, step)
        tally.merge(measured)
        self._observe(groups)
        if self.config.rollout.ahead and not self._is_saved_after(step):
            following, frozen = self.prompts_of(step + 1), self.sampler.frozen()
            self.ahead.begin(step + 1, partial(self._sampled, frozen, following, step + 1))
        return groups

    def _is_saved_after(self, step: int) -> bool:
        """A run that resumes there has only the policy of that moment, so the undisturbed one samples with it, too."""
        done = step + 1
        return self.is_checkpoint(done) or self.course.is_due(done)

    def is_checkpoint(self, done: int) -> bool:
        return done == self.total_steps or done % self.config.run.save_every == 0

    def _sampled(self, sampler: Sampler, prompts: Sequence[Prompt], step: int) -> Rollout:
        """One at a time, so what the scorer measures meanwhile is of these groups."""
        rollout = self.config.rollout
        self.scorer.measured()  # an evaluation may have left something
        groups = collect(sampler, self.scorer, prompts, self.sampling_of(step))
        if rollout.dead_groups == "refill":
            groups = refill(groups, partial(self._fresh, sampler, step), rollout.refills)
        return groups, self.scorer.measured()

    def _fresh(self, sampler: Sampler, step: int, number: int, count: int) -> list[ScoredGroup]:
        problems = distributed.mine(self.curriculum.spare(step, number))[:count]
        prompts = [self.prompter.prompt(problem) for problem in problems]
        return collect(sampler, self.scorer, prompts, self.sampling_of(step, number))

    def close(self) -> None:
        """End what goes on beside the loop."""
        self.ahead.close()
        self.sampler.close()
        self.screen.close()
        if self.journal:
            self.journal.close()

    def update(self, minibatch: MiniBatch, step: int, tally: Tally) -> Measured:
        return self.policy.update(self.gradient(minibatch, tally), step)

    def gradient(self, minibatch: MiniBatch, tally: Tally) -> Callable[[], None]:
        return partial(
            gradient_that_fits, self.policy, minibatch, self.config.algorithm, self.kl.value, tally, self.room
        )

    def _observe(self, groups: Sequence[ScoredGroup]) -> None:
        """Tell the curriculum how every rank did, so that all of them go on drawing the same problems."""
        for rates in distributed.gather(solve_rates(groups, self.config.reward.answer == "lenient")):
            self.curriculum.observe(rates)

    def sampling_of(self, step: int, number: int = 0) -> Sampling:
        """Seeds differ by run, step, round and rank, and follow from them: a resumed run samples what it would have."""
        seed = (self.config.run.seed * 1_000_003 + step) * 4_099 + distributed.rank() + number * 2**40
        rollout = self.config.rollout
        return Sampling(rollout.group_size, rollout.temperature, rollout.max_new_tokens, seed)

    def evaluate(self, name: str) -> Evaluation:
        with self.policy.gathered():
            limit = self.config.rollout.max_new_tokens
            return evaluate(name, self.evaluator, self.scorer.verifier(), self.held_out, limit)


def train(parts: Parts) -> None:
    settings, algorithm = parts.config, parts.config.algorithm
    health = Health(
        parts.folder,
        parts.policy,
        parts.screen.warn,
        fresh=parts.first_step == 0,
        max_difference=settings.rollout.vllm.max_difference,
        uses_vllm=uses_vllm(parts.sampler),
    )
    beforehand = parts.beforehand
    parts.screen.start()
    if parts.course.is_owed(parts.first_step):
        look_back(parts, parts.first_step)
    for step in range(parts.first_step, parts.total_steps):
        if parts.course.has_stopped_rising:
            break
        tally, phases = Tally(), Phases()
        with phases("problem"):
            prompts = parts.prompts_of(step)
        with phases("rollout"), parts.policy.gathered():  # the reward is computed beside it
            groups = parts.roll_out(prompts, step, tally)
        with phases("advantage"):
            parts.policy.refresh_reference(step)
            places = worth_training_on(groups, settings)
            live = beforehand.penalised([groups[place] for place in places], parts.kl.value, tally)
            spread = step_deviation(groups, algorithm)
            rows = [rows_of(group, algorithm, spread, of_all_ranks(place)) for group, place in zip(live, places)]
        with phases("batch"):
            minibatches = beforehand.prepare(deal(rows, idle_row(groups[0]), settings, parts.packer))
        with phases("step"):
            passes = minibatches * algorithm.epochs
            updates = [parts.update(minibatch, step, tally) for minibatch in passes if minibatch.tokens]
        health.check(step + 1, updates, all_rows(rows))
        metrics = record(parts, step + 1, groups, updates, tally, phases)
        health.compare(step + 1, metrics)


def worth_training_on(groups: Sequence[ScoredGroup], settings: Config) -> list[int]:
    """The places of those that are not dropped."""
    return [place for place, group in enumerate(groups) if not (group.is_dead and settings.drops_dead_groups)]


def of_all_ranks(place: int) -> int:
    """A place among the groups of this rank as one among those of all: problems are dealt to ranks in turn."""
    return place * distributed.world_size() + distributed.rank()


def step_deviation(groups: Sequence[ScoredGroup], settings: Algorithm) -> float:
    """Of all rewards of the step, on all ranks, where the advantage is measured in it."""
    if settings.advantage != "batch_std":
        return 0.0
    rewards = distributed.gather([reward for group in groups for reward in scored(group.rewards_G)])
    return deviation([reward for of_rank in rewards for reward in of_rank], settings.advantage_ddof)


def gradient_that_fits(
    policy: Policy, minibatch: MiniBatch, settings: Algorithm, kl_coef: float, tally: Tally, room: Room
) -> None:
    """The gradient, in smaller pieces where memory runs out; what is tallied is of the attempt that succeeds."""

    def attempt() -> Tally:
        seen = Tally()
        gradient(policy, minibatch, settings, kl_coef, seen)
        return seen

    tally.merge(until_it_fits(attempt, partial(room.make, [minibatch])).sums)


def gradient(policy: Policy, minibatch: MiniBatch, settings: Algorithm, kl_coef: float, tally: Tally) -> None:
    """The gradient of the loss of one update, micro-batch by micro-batch."""
    for index in range(len(minibatch.batches)):
        scores = policy.score(minibatch.batches[index])
        batch = remember(minibatch, index, scores)
        loss = total(objective(scores, batch, settings, kl_coef), batch, minibatch.divisor)
        policy.backward(loss)
        if not policy.is_displaced:
            tally_batch(tally, batch, scores, settings)
            tally.add("loss", loss.item(), float(batch.counted_BT.sum()) / minibatch.tokens)


def remember(minibatch: MiniBatch, index: int, scores: Scores) -> TrainingBatch:
    """The batch with the log-probs of the policy that answered. In the first pass that is still this one."""
    batch = minibatch.batches[index]
    if batch.old_logprobs_BT is None:
        minibatch.batches[index] = replace(batch, old_logprobs_BT=scores.logprobs_BT.detach())
    return minibatch.batches[index]


def record(
    parts: Parts, step: int, groups: Sequence[ScoredGroup], updates: Sequence[Measured], tally: Tally, phases: Phases
) -> dict[str, float]:
    """Write the step down, and do what is due after it: a checkpoint, an evaluation. The metrics of the step."""
    tally_groups(tally, groups)
    tally.add("groups", len(groups) * distributed.world_size())  # more than rollout.problems after a refill
    metrics = tally.means(distributed.gather) | metrics_of_updates(updates)
    if "kl" in metrics:
        metrics["kl_coef"] = parts.kl.value
        parts.kl.observe(metrics["kl"])
    metrics |= metrics_of_phases(phases)
    if parts.journal:
        parts.journal.metrics(step, metrics)
        parts.journal.samples(step, groups)
    parts.screen.step(step, metrics)
    is_last, evaluates = step == parts.total_steps, parts.course.is_due(step)
    stops = parts.stopping.is_due(is_last, evaluates)
    if evaluates or is_last or stops or parts.is_checkpoint(step):  # before the evaluation, which may be cut short
        checkpoints.save(parts.policy, parts.folder, step, parts.config.run.keep, parts.learned)
    if stops and (evaluates or not is_last):
        parts.stopping.stop(step)
    if evaluates:
        look_back(parts, step)
    return metrics


def metrics_of_phases(phases: Phases) -> dict[str, float]:
    return {f"time/{name}": seconds for name, seconds in phases.seconds.items()} | memory_use.metrics(phases.peaks)


def look_back(parts: Parts, step: int) -> None:
    """The evaluation after a step. It is done when the journal has it, so what it makes is kept before that."""
    course, phases = parts.course, Phases()
    with parts.stopping.evaluating(step):
        with phases("evaluation"):
            evaluation = parts.evaluate(f"step {step}")
        is_best = course.add(step, evaluation)
        if is_best:
            with parts.policy.gathered():
                if distributed.is_main():
                    course.keep(parts.policy.export)
        if parts.journal:
            parts.journal.evaluation(step, metrics_of(evaluation) | metrics_of_phases(phases))
    parts.screen.say(f"after step {step}: {describe(evaluation)}{', the best so far' if is_best else ''}")
