"""The numbers of a step. Everything is a sum and a weight until the last moment, so ranks add up exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import sqrt
from time import perf_counter
from typing import TYPE_CHECKING

from trainer.types import ScoredGroup, TrainingBatch

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.logprobs import Scores

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight)


class Tally:
    """Weighted sums by name; `means` turns them into metrics."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, name: str, amount: float, weight: float = 1.0) -> None:
        """`amount` is a sum over `weight` things."""
        before, weighed = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (before + float(amount), weighed + float(weight))

    def add_all(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self.add(name, value)

    def merge(self, sums: Sums) -> None:
        for name, (amount, weight) in sums.items():
            self.add(name, amount, weight)

    def means(self, gather: Callable[[Sums], list[Sums]]) -> dict[str, float]:
        """Mean of each name over all ranks; `gather` brings the sums of every rank."""
        together = Tally()
        for sums in gather(self.sums):
            together.merge(sums)
        return _with_deviations({name: amount / weight for name, (amount, weight) in together.sums.items() if weight})


def _with_deviations(means: dict[str, float]) -> dict[str, float]:
    """`x/std` in place of the mean square `x/square`."""
    squares = {name.removesuffix("/square"): value for name, value in means.items() if name.endswith("/square")}
    rest = {name: value for name, value in means.items() if not name.endswith("/square")}
    return rest | {
        f"{name}/std": sqrt(max(0.0, square - means[f"{name}/mean"] ** 2)) for name, square in squares.items()
    }


def tally_groups(tally: Tally, groups: Iterable[ScoredGroup]) -> None:
    """What the sampled answers say: reward, its parts, accuracy, length."""
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


def tally_batch(tally: Tally, batch: TrainingBatch, scores: Scores, loss_BT: Tensor) -> None:
    """What the training pass says, token by token: loss, entropy, and how far the policy is from the sampler."""
    mask_BT = batch.mask_BT
    tokens, rows = float(mask_BT.sum()), len(batch.advantages_B)
    apart_BT = (scores.logprobs_BT.detach() - batch.sampled_logprobs_BT).abs()
    tally.add("loss", float((loss_BT * mask_BT).sum()), tokens)
    tally.add("entropy", float(scores.entropy_BT.sum()), tokens)
    tally.add("sampler_difference", float((apart_BT * mask_BT).sum()), tokens)
    tally.add("advantage/mean", float(batch.advantages_B.sum()), rows)
    tally.add("advantage/square", float(batch.advantages_B.square().sum()), rows)


class Phases:
    """Seconds spent in each word of the loop."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - began
