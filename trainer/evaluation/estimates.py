"""What a few hundred answers can say: shares with honest intervals, pass@k, and the paired test."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean, pvariance
from typing import NamedTuple

CONFIDENCE = 0.95


class Share(NamedTuple):
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The Wilson interval of a share: honest for small samples and near 0 and 1, where the usual one is not."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def share_of(values: Sequence[float], answers_each: float = 1.0) -> Share:
    """The mean over problems of a number between 0 and 1, with the Wilson interval of as many independent answers.

    Eight answers to one problem are not eight problems. How many independent answers would scatter as much as the
    problems do is `mean * (1 - mean) / (variance over problems / problems)`: the number of problems when the answers to
    one are all alike, and so exactly Wilson for one answer each; `answers_each` times as many when problems do not
    differ, which is the most that is believed. Where every value is 0, or every value is 1, problems are counted.
    """
    mean, variance = fmean(values), pvariance(values)
    independent: float = len(values)
    if 0 < mean < 1:
        most = len(values) * max(1.0, answers_each)
        independent = min(most, mean * (1 - mean) * len(values) / variance) if variance else most
    return Share(mean, *wilson(mean * independent, independent))


def pass_at(k: int, answers: int, correct: int) -> float:
    """The chance that at least one of k answers is right, drawn without replacement from those there are.

    Chen et al. 2021, equation 1. Unbiased, which 1 - (1 - accuracy) ** k is not.
    """
    return 1 - comb(answers - correct, k) / comb(answers, k)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """Problems gained, problems lost, and the exact chance of so uneven a split if neither model is better."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    flipped = gained + lost
    tail = sum(comb(flipped, k) for k in range(min(gained, lost) + 1))
    return gained, lost, min(1.0, 2 * tail / 2**flipped)
