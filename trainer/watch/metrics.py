"""The numbers of a step. Everything is a sum and a weight until the last moment, so ranks add up exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import sqrt
from statistics import fmean
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from trainer.config import Algorithm
from trainer.kl import ESTIMATORS
from trainer.logprobs import Scores
from trainer.losses import correction, mean_over_row, mismatch
from trainer.types import ScoredGroup, TrainingBatch
from trainer.watch import memory

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight)
LARGEST = "/max"  # names that end so are maxima


class Measured(Protocol):
    """What is logged of an update."""

    @property
    def grad_norm(self) -> float: ...

    @property
    def lr(self) -> float: ...

    @property
    def skipped(self) -> bool: ...

    @property
    def measured(self) -> Mapping[str, float]: ...


class Tally:
    """Weighted sums by name; `means` turns them into metrics."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, name: str, amount: float, weight: float = 1.0) -> None:
        """`amount` is a sum over `weight` things."""
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


def tally_batch(tally: Tally, batch: TrainingBatch, scores: Scores, settings: Algorithm) -> None:
    """What the training pass says, token by token: entropy, and how far the policy is from all the others."""
    counted_BT, rows_B, now_BT = batch.counted_BT, batch.weights_B > 0, scores.logprobs_BT.detach()
    assert batch.old_logprobs_BT is not None, "the first pass over a batch stores them"
    if not counted_BT.any():
        return
    mismatch_BT = mismatch(batch.old_logprobs_BT, batch.sampled_logprobs_BT, batch.mask_BT, settings.correction)
    moved_BT = now_BT - batch.old_logprobs_BT
    if settings.loss == "gspo":
        moved_BT = mean_over_row(moved_BT, batch.mask_BT).expand_as(moved_BT)
    advantages_BT = batch.advantages_B[:, None].expand_as(counted_BT)
    sums = {
        "entropy": scores.entropy_BT.detach()[counted_BT],
        **_of_the_sampler((batch.old_logprobs_BT - batch.sampled_logprobs_BT)[counted_BT]),
        "sampler_ratio/raw": mismatch_BT[counted_BT],
        "sampler_ratio/corrected": correction(mismatch_BT, settings.correction)[counted_BT],
        **_of_the_update(moved_BT[counted_BT].exp(), advantages_BT[counted_BT], settings),
    }
    if batch.reference_logprobs_BT is not None:
        sums["kl"] = ESTIMATORS[settings.kl.estimator]((now_BT - batch.reference_logprobs_BT)[counted_BT])
    sums |= {"advantage/mean": batch.advantages_B[rows_B], "advantage/square": batch.advantages_B[rows_B].square()}
    reduced = [values.max() if name.endswith(LARGEST) else values.float().sum() for name, values in sums.items()]
    for (name, values), value in zip(sums.items(), torch.stack(reduced).tolist(), strict=True):  # one wait for the card
        tally.add(name, value, len(values))


def _of_the_sampler(apart_N: Tensor) -> dict[str, Tensor]:
    """The policy that answered against the log-probs that came with the answers; the KL is the k3 estimate."""
    size_N = apart_N.abs()
    divergence_N = apart_N.expm1() - apart_N
    return {"sampler_difference": size_N, f"sampler_difference{LARGEST}": size_N, "sampler_kl": divergence_N}


def _of_the_update(ratio_N: Tensor, advantages_N: Tensor, settings: Algorithm) -> dict[str, Tensor]:
    """The policy now against the one that answered, and how often the clip on the side of the advantage is passed."""
    low_N = (ratio_N < 1 - settings.clip_low) & (advantages_N < 0)
    high_N = (ratio_N > 1 + settings.clip_high) & (advantages_N > 0)
    return {"ratio": ratio_N, f"ratio{LARGEST}": ratio_N, "clipped/low": low_N, "clipped/high": high_N}


def metrics_of_updates(updates: Sequence[Measured]) -> dict[str, float]:
    """The same on all ranks: means over the updates of a step that were not skipped, and the rate of the last."""
    done = [update for update in updates if not update.skipped]
    metrics = {"lr": updates[-1].lr, "skipped": float(len(updates) - len(done))} if updates else {}
    if done:
        metrics["grad_norm"] = fmean(update.grad_norm for update in done)
        metrics |= {name: fmean(update.measured[name] for update in done) for name in done[0].measured}
    return metrics


class Phases:
    """Seconds spent in each word of the loop, and the most memory that was used at once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, memory.Peak] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = perf_counter()
        memory.forget_peak()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - began
            self.peaks[name] = memory.peak()
