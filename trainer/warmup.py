"""warm_up(): supervised training on solutions, before GRPO or alone: batch -> loss -> step.

A solution is a row like any other, with an advantage of 1. So the loss is the cross-entropy of the answers' tokens,
summed and divided once by their number over all micro-batches and ranks, and engine, checkpoints, evaluation and
memory are those of GRPO (`loop.py`). The solutions are the task's, or right answers that the model has sampled itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trainer.batch.pack import GroupRows, all_rows, minibatches
from trainer.config.settings import Config
from trainer.evaluation.evaluator import Evaluator
from trainer.loop import evaluate, finish_step
from trainer.machine.out_of_memory import until_it_fits
from trainer.problem.task import draw
from trainer.ranks import distributed
from trainer.records import TrainingRow
from trainer.rollout import self_training
from trainer.rollout.collect import Rollouts
from trainer.run_folder.record import Record
from trainer.step.update import Updater
from trainer.watch.health import Health
from trainer.watch.phases import Phases
from trainer.watch.tally import Tally, metrics_of_updates

MEASURED = ("loss", "entropy")  # of what is tallied of a row; the rest compares it with a sampler


@dataclass(slots=True)
class Lessons:
    """The solutions that are taught now, and those of held-out problems, as rows."""

    config: Config
    rows: Sequence[TrainingRow]
    held_out: Sequence[TrainingRow]

    def begin(self, step: int, rollouts: Rollouts, updater: Updater, record: Record) -> dict[str, float]:
        """Sample solutions where a round of own answers begins, or read them where a run goes on within one. Return
        what is logged of them. Every rank calls it."""
        if self.config.warmup.source == "solutions":
            return {}
        number, place = self_training.round_of(self.config, step)
        if place:
            self.rows = self.rows or self_training.read(record.folder, number)
            return {}
        with updater.policy.gathered():
            self.rows, measured = self_training.sample(rollouts, step, number)
        self_training.write(record.folder, number, self.rows)
        record.screen.say(
            f"round {number + 1} of {self.config.warmup.rounds}: {measured['samples/right']:.1%} of the answers are "
            f"right, {measured['samples/solved']:.1%} of the problems are solved, {len(self.rows)} answers of "
            f"{measured['samples/length']:.0f} tokens are kept"
        )
        return measured

    def of(self, step: int) -> list[GroupRows]:
        """Return this rank's share of the solutions of a step, each with its index among those of all ranks."""
        drawn = draw(self.rows, step, self.config.warmup.problems, self.config.run.seed)
        return [GroupRows([row], float(sum(row.mask)), place) for place, row in distributed.mine([*enumerate(drawn)])]

    def held_out_loss(self, updater: Updater) -> float | None:
        """Return the mean cross-entropy of a token of the held-out solutions. Every rank calls it."""
        rows = distributed.mine(self.held_out)

        def make_room() -> None:
            updater.shrinker.shrink(updater.packer.pack(rows))  # they are packed again with the smaller budget

        found = until_it_fits(lambda: _log_likelihood(updater, rows), make_room)
        sums = distributed.gather((found, sum(sum(row.mask) for row in rows)))
        loss, tokens = (sum(parts) for parts in zip(*sums, strict=True))
        return -loss / tokens if tokens else None


@torch.no_grad()
def _log_likelihood(updater: Updater, rows: Sequence[TrainingRow]) -> float:
    batches = (batch.to(updater.device) for batch in updater.packer.pack(rows))
    return sum(float((updater.policy.measure(batch).logprobs_BT * batch.mask_BT).sum()) for batch in batches)


def warm_up(
    config: Config, rollouts: Rollouts, updater: Updater, evaluator: Evaluator, record: Record, lessons: Lessons
) -> None:
    """Train the policy on worked solutions, from the first step of this start to the last or to an early stop."""
    history = evaluator.history
    health = Health(record.folder, updater.policy, record.screen.warn, record.first_step == 0)
    record.screen.start()
    if history.was_interrupted_at(record.first_step):
        evaluate(evaluator, record, record.first_step)
    for step in range(record.first_step, record.total_steps):
        if history.has_stopped_rising:
            break
        done, tally, phases = step + 1, Tally(), Phases()
        with phases("samples"):
            sampled = lessons.begin(step, rollouts, updater, record)
        with phases("batch"):
            idle = replace(lessons.rows[0], weight=0.0)  # for a rank without solutions
            rows = lessons.of(step)
            dealt = minibatches(rows, idle, config, updater.packer)
        with phases("loss"):
            prepared = updater.prepare(dealt)
        with phases("step"):
            updates = updater.update(prepared, step, tally)
        health.check(done, updates, all_rows(rows))
        means = tally.means(distributed.gather)
        metrics = {"tokens": sum(one.tokens for one in dealt), **{name: means[name] for name in MEASURED}}
        metrics |= metrics_of_updates(updates) | phases.metrics()
        record.step(done, [], sampled | metrics)
        finish_step(done, rollouts, updater, evaluator, record)
