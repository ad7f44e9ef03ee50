"""Two runs on the same held-out problems, compared problem by problem."""

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


def paired(before: RunFiles, after: RunFiles) -> Pair | None:
    """Compare the trained models of two runs on the problems that both were asked; None if there are none."""
    both = [problem for problem in before.solved if problem in after.solved]
    if not both:
        return None
    gained, lost, p = mcnemar([before.solved[one] for one in both], [after.solved[one] for one in both])
    return Pair(len(both), gained, lost, p, paired_difference(gained, lost, len(both)))


def against_best(runs: Sequence[RunFiles]) -> list[Pair | None]:
    """Compare each run with the first. Holm's correction of p is over all that have common problems with it."""
    pairs = [None, *(paired(runs[0], run) for run in runs[1:])]
    ps = iter(corrected([pair.p for pair in pairs if pair]))
    return [pair and pair._replace(p=next(ps)) for pair in pairs]


def by_task(runs: Sequence[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs of each task, the highest accuracy first. Accuracies on different tasks have no order."""
    found: dict[str, list[RunFiles]] = {}
    for run in runs:
        keys = (key for key in run.settings if key.startswith("task.") and key not in OF_TRAINING)
        task = str([run.settings[key] for key in keys])
        found.setdefault(task, []).append(run)
    return [sorted(these, key=lambda run: -(facts_of(run)["accuracy"] or 0.0)) for these in found.values()]
