"""The numbers of a step. Everything is a sum and a weight until the end, so ranks add up exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import fmean

from trainer.records import ScoredGroup, Update

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight)
LARGEST = "/max"  # names that end so are maxima


class Tally:
    """Holds weighted sums by name; `means` turns them into metrics."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, name: str, amount: float, weight: float = 1.0) -> None:
        """Add a sum over `weight` things."""
        before, weighed = self.sums.get(name, (0.0, 0.0))
        if name.endswith(LARGEST):
            self.sums[name] = (max(before, float(amount)), 1.0)
        else:
            self.sums[name] = (before + float(amount), weighed + float(weight))

    def add_all(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self.add(name, value)

    def merge(self, sums: Sums) -> None:
        for name, (amount, weight) in sums.items():
            self.add(name, amount, weight)

    def means(self, gather: Callable[[Sums], list[Sums]]) -> dict[str, float]:
        """Return the mean of each name over all ranks; `gather` brings the sums of every rank."""
        together = Tally()
        for sums in gather(self.sums):
            together.merge(sums)
        return _with_deviations({name: amount / weight for name, (amount, weight) in together.sums.items() if weight})


def _with_deviations(means: dict[str, float]) -> dict[str, float]:
    """Replace the mean square `x/square` by the standard deviation `x/std`."""
    squares = {name.removesuffix("/square"): value for name, value in means.items() if name.endswith("/square")}
    rest = {name: value for name, value in means.items() if not name.endswith("/square")}
    return rest | {
        f"{name}/std": sqrt(max(0.0, square - means[f"{name}/mean"] ** 2)) for name, square in squares.items()
    }


def tally_groups(tally: Tally, groups: Iterable[ScoredGroup]) -> None:
    """Count what the sampled answers show: reward and its parts, accuracy, length."""
    for group in groups:
        tally.add("dead_groups", group.is_dead)
        for completion, score in zip(group.completions, group.scores, strict=True):
            tally.add("length", len(completion.tokens))
            tally.add("truncated", completion.truncated)
            tally.add("accuracy/strict", score.correct_strict)
            tally.add("accuracy/lenient", score.correct_lenient)
            tally.add_all("reward/mean", [] if score.reward is None else [score.reward])
            tally.add_all("reward/square", [] if score.reward is None else [score.reward**2])
            for name, value in score.components.items():
                tally.add_all(f"reward/{name}", [] if value is None else [value])


def metrics_of_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Return means over the updates of a step that were not skipped, and the last learning rate."""
    done = [update for update in updates if not update.skipped]
    metrics = {"lr": updates[-1].lr, "skipped": float(len(updates) - len(done))} if updates else {}
    if done:
        metrics["grad_norm"] = fmean(update.grad_norm for update in done)
        metrics |= {name: fmean(update.measured[name] for update in done) for name in done[0].measured}
    return metrics
