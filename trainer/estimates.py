"""Statistics of a few hundred answers: shares, intervals, pass@k, the paired test, Holm's correction, Student's t."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import comb, sqrt
from statistics import NormalDist, fmean, pvariance
from typing import NamedTuple

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
SIGNIFICANT = 0.05


class Share(NamedTuple):
    """A share and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Wilson interval of a share, which is valid for small samples and near 0 and 1 as well."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def share_of(values: Sequence[float], answers_each: float = 1.0) -> Share:
    """Return the mean of one value between 0 and 1 for each problem, with a Wilson interval.

    Eight answers to one problem are not eight independent answers. The interval uses the number of independent answers
    that would have the same variance, `mean * (1 - mean) / (variance over problems / problems)`. It equals the number
    of problems if all answers to a problem agree, so for one answer each the interval is exactly Wilson's. It is at
    most `answers_each` times the number of problems, which it reaches if problems do not differ. If every value is 0,
    or every value is 1, it is the number of problems.
    """
    mean, variance = fmean(values), pvariance(values)
    independent: float = len(values)
    if 0 < mean < 1:
        most = len(values) * max(1.0, answers_each)
        independent = min(most, mean * (1 - mean) * len(values) / variance) if variance else most
    return Share(mean, *wilson(mean * independent, independent))


def pass_at(k: int, answers: int, correct: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement, is right.

    Chen et al. 2021, equation 1. It is unbiased; 1 - (1 - accuracy) ** k is not.
    """
    return 1 - comb(answers - correct, k) / comb(answers, k)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """Return the problems gained, the problems lost, and the p-value of the exact McNemar test."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    return gained, lost, _exact(gained, lost)


@lru_cache(maxsize=1024)
def _exact(gained: int, lost: int) -> float:
    flipped = gained + lost
    tail = sum(comb(flipped, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flipped)


def paired_difference(gained: int, lost: int, problems: int) -> Share:
    """Return the difference of two accuracies on the same problems.

    Wald's interval for paired shares with half a problem added to each of the four cells (Agresti and Min 2005) and a
    continuity correction. Where it leaves 0 out and the exact McNemar test does not, or the other way round, which it
    may by the last digit, its end is moved across 0.
    """
    total = problems + 2
    middle = (gained - lost) / total
    half = Z * sqrt(gained + lost + 1 - (gained - lost) ** 2 / total) / total + 1 / problems
    is_significant = _exact(gained, lost) < SIGNIFICANT
    if is_significant != (half < abs(middle)):
        half = abs(middle) * (0.999 if is_significant else 1.001)
    return Share((gained - lost) / problems, max(-1.0, middle - half), min(1.0, middle + half))


def corrected(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's correction, in their order."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    found, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        found[index] = largest
    return found


def two_sided(t: float, freedom: float) -> float:
    """Return the probability of a value of Student's t as far from 0."""
    from mpmath import betainc

    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: float) -> float:
    """Return the value below which Student's t is with a probability of more than a half."""
    low, high = 0.0, 1e3
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - two_sided(middle, freedom) / 2 < probability else (low, middle)
    return high
