"""Runs side by side: those of a task, the best first, each tested against it problem by problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.estimates import Share, corrected, mcnemar, paired_difference
from trainer.run_folder.reader import RunFiles, facts_of

OF_TRAINING = {"task.limit", "task.curriculum"}  # they leave the held-out problems as they are


class Pair(NamedTuple):
    """What the trained model of one run gains and loses against that of another. `p` is corrected for several runs."""

    problems: int
    gained: int
    lost: int
    p: float
    difference: Share

    def __str__(self) -> str:
        value, low, high = (100 * number for number in self.difference)
        return f"{value:+.1f} ({low:+.1f} to {high:+.1f}), p = {self.p:.2g}"


def ranked(runs: Sequence[RunFiles]) -> list[list[tuple[RunFiles, Pair | None]]]:
    """Return the runs of each task, the highest accuracy first, and how each differs from the first where both were
    asked the same problems. Accuracies on different tasks have no order. Holm's correction of p is within a task."""
    tasks: dict[str, list[RunFiles]] = {}
    for run in runs:
        keys = (key for key in run.settings if key.startswith("task.") and key not in OF_TRAINING)
        tasks.setdefault(str([run.settings[key] for key in keys]), []).append(run)
    found = []
    for of_task in tasks.values():
        first, *others = sorted(of_task, key=lambda run: -(facts_of(run)["accuracy"] or 0.0))
        pairs = [_paired(first, run) for run in others]
        ps = iter(corrected([pair.p for pair in pairs if pair]))
        pairs = [pair and pair._replace(p=next(ps)) for pair in pairs]
        found.append([(first, None), *zip(others, pairs, strict=True)])
    return found


def _paired(before: RunFiles, after: RunFiles) -> Pair | None:
    both = [problem for problem in before.solved if problem in after.solved]
    if not both:
        return None
    gained, lost, p = mcnemar([before.solved[one] for one in both], [after.solved[one] for one in both])
    return Pair(len(both), gained, lost, p, paired_difference(gained, lost, len(both)))
