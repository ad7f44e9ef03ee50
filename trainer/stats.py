"""Statistics: shares, intervals, pass@k, paired tests, Holm's correction, Student's t, and the arms of a study."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from math import comb, fsum, sqrt
from statistics import NormalDist, fmean, pvariance, stdev, variance
from typing import NamedTuple

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
SIGNIFICANT = 0.05
POWER = 0.8  # the power of a test if the variance over seeds were known
FOUND = 0.7  # its power with the variance of a few seeds, in simulations
WIDEST = 4.0  # an interval of a share that reaches further is useless

Table = Sequence[Sequence[float]]  # a row for each seed, with a number for each problem


class Share(NamedTuple):
    """A share, or another mean, and its 95 % interval."""

    value: float
    low: float
    high: float


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """Return the Wilson interval of a share, which is valid for small samples and near 0 and 1 as well."""
    share, spread = successes / trials, Z * Z / trials
    middle = share + spread / 2
    half = Z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def share_of(values: Sequence[float], answers_each: float = 1.0) -> Share:
    """Return the mean of one value between 0 and 1 for each problem, with a Wilson interval.

    Eight answers to one problem are not eight independent answers. The interval uses the number of independent answers
    that would have the same variance, `mean * (1 - mean) / (variance over problems / problems)`. This equals the number
    of problems if all answers to a problem agree, so for one answer each the interval is exactly Wilson's. It is at
    most `answers_each` times the number of problems, which it reaches if problems do not differ. If all values are 0,
    or all are 1, it is the number of problems.
    """
    mean, variance = fmean(values), pvariance(values)
    independent: float = len(values)
    if 0 < mean < 1:
        most = len(values) * answers_each
        independent = min(most, mean * (1 - mean) * len(values) / variance) if variance else most
    return Share(mean, *wilson(mean * independent, independent))


def pass_at(k: int, answers: int, correct: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement, is right (Chen et al. 2021,
    equation 1). This is unbiased, unlike 1 - (1 - accuracy) ** k."""
    return 1 - comb(answers - correct, k) / comb(answers, k)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """Return the numbers of problems gained and lost, and the p-value of the exact McNemar test."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    return gained, lost, _exact(gained, lost)


def visible_gain(problems: int) -> float | None:
    """Return the smallest gain that McNemar's test detects if one right problem in twenty turns wrong, or None."""
    lost = round(problems / 20)
    gained = next((count for count in range(lost, problems - lost + 1) if _exact(count, lost) < SIGNIFICANT), None)
    return None if gained is None else (gained - lost) / problems


def what_shows(problems: int) -> str:
    if not (gain := visible_gain(problems)):
        return "too few to show any gain"
    return f"in which a gain below {100 * gain:.{int(gain < 0.015)}f} points may not show"


@lru_cache(maxsize=1024)
def _exact(gained: int, lost: int) -> float:
    flipped, ways, tail = gained + lost, 1, 1
    for k in range(min(gained, lost)):
        ways = ways * (flipped - k) // (k + 1)  # comb(flipped, k + 1), which takes seconds for thousands
        tail += ways
    return min(1.0, 2 * tail / 2**flipped)


def paired_difference(gained: int, lost: int, problems: int) -> Share:
    """Return the difference of two accuracies on the same problems, with Wald's interval for paired shares, half a
    problem added to each of the four cells (Agresti and Min 2005), and a continuity correction. If the interval and the
    exact McNemar test disagree whether the difference may be 0, the end of the interval is moved across 0."""
    total = problems + 2
    middle = (gained - lost) / total
    half = Z * sqrt(gained + lost + 1 - (gained - lost) ** 2 / total) / total + 1 / problems
    is_significant = _exact(gained, lost) < SIGNIFICANT
    if is_significant != (half < abs(middle)):
        half = abs(middle) * (0.999 if is_significant else 1.001)
    return Share((gained - lost) / problems, max(-1.0, middle - half), min(1.0, middle + half))


def mean_of(values: Sequence[float], least_error: float = 0.0) -> tuple[Share, float]:
    """Return the mean of one value for each problem with Student's interval, and p for the hypothesis that it is 0."""
    mean, freedom = fmean(values), max(1, len(values) - 1)
    error = max(least_error, stdev(values) / sqrt(len(values)) if len(values) > 1 else abs(mean))
    half = error * quantile((1 + CONFIDENCE) / 2, freedom)
    return Share(mean, mean - half, mean + half), two_sided(mean / error, freedom) if error else float(not mean)


def corrected(ps: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's correction, in the same order."""
    order = sorted(range(len(ps)), key=lambda index: ps[index])
    adjusted, largest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, ps[index] * (len(ps) - rank)))
        adjusted[index] = largest
    return adjusted


def two_sided(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at least as far from 0."""
    from mpmath import betainc

    return float(betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True))


@lru_cache(maxsize=1024)
def quantile(probability: float, freedom: float) -> float:
    """Return the quantile of Student's t for a probability above a half, to six decimals."""
    return bisect_left(range(10**9), probability, key=lambda t: 1 - two_sided(t / 1e6, freedom) / 2) / 1e6


def rise(values: Sequence[float], part: int) -> Share:
    """Return the mean of the last values minus that of the first ones, with Welch's interval."""
    first, last = values[:part], values[-part:]
    before, after = variance(first), variance(last)
    freedom = (part - 1) * (before + after) ** 2 / (before**2 + after**2) if before or after else part - 1
    half = quantile((1 + CONFIDENCE) / 2, int(freedom)) * sqrt((before + after) / part)
    change = fmean(last) - fmean(first)
    return Share(change, change - half, change + half)


# The difference between two arms of a study, generalised to other seeds and other problems.
#
# Every arm is trained with the same seeds and asked the same problems, so two arms have a difference for each seed and
# problem: of rewards, or 1, 0 or -1 if each answer is right or wrong. Seeds and problems are two crossed random
# factors: a seed shifts all problems of its run, and a problem may be easier for one arm in all its runs. The variance
# of the mean difference is the sum of the components of seeds, of problems and of the residual (analysis of variance),
# and the t distribution has Satterthwaite's degrees of freedom. `bench/coverage.py` shows by simulation how often the
# intervals contain the truth.


class Effect(NamedTuple):
    """A difference of two accuracies or mean rewards."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom of the t distribution
    error_of_seeds: float  # standard error of the mean over seeds, on these problems
    seeds: int
    span: float = 1.0  # between the least and the most that an answer is worth

    @property
    def p(self) -> float:
        """Return the larger of two p-values: for seeds and problems together, and for seeds alone. With few seeds, the
        first one is too small if seeds differ by more than their sample shows."""
        of_seeds = two_sided(self.value / self.error_of_seeds, self.seeds - 1)
        return max(two_sided(self.value / self.error, self.freedom), of_seeds)

    @property
    def interval(self) -> tuple[float, float]:
        half = self.error * quantile((1 + CONFIDENCE) / 2, self.freedom)
        return max(-self.span, self.value - half), min(self.span, self.value + half)

    def detectable(self, comparisons: int = 1) -> float:
        """Return the difference that a study of this size detects with a probability of about `FOUND`, even if it
        detects none in its other comparisons."""
        level = 1 - (1 - CONFIDENCE) / comparisons / 2
        tests = ((self.error, self.freedom), (self.error_of_seeds, self.seeds - 1))
        return max(error * (quantile(level, freedom) + quantile(POWER, freedom)) for error, freedom in tests)


def effect(differences_SP: Table, span: float = 1.0) -> Effect:
    """Return the mean difference over at least two seeds and two problems. `span` lies between the least and the most
    that an answer is worth."""
    seeds, problems = len(differences_SP), len(differences_SP[0])
    of_seeds = [fsum(row) / problems for row in differences_SP]
    of_problems = [fsum(column) / seeds for column in zip(*differences_SP, strict=True)]
    mean = fsum(of_seeds) / seeds
    by_seed, by_problem = problems * variance(of_seeds, mean), seeds * variance(of_problems, mean)
    squares = fsum((value - mean) ** 2 for row in differences_SP for value in row)
    residual = squares - by_seed * (seeds - 1) - by_problem * (problems - 1)
    residual = max(0.0, residual) / ((seeds - 1) * (problems - 1))
    of_seed = max(0.0, by_seed - residual)  # the variance of seeds in addition to the noise of single answers
    total = by_problem + of_seed
    error = max(sqrt(total / seeds / problems), span / problems)  # at least that of one problem
    # Seeds count here even if they add no variance, because a few seeds that happen to agree say little about others.
    parts = by_seed**2 / (seeds - 1) + by_problem**2 / (problems - 1)
    freedom = min(max(total**2 / parts, seeds - 1), problems - 1) if parts else problems - 1
    return Effect(mean, error, freedom, max(stdev(of_seeds) / sqrt(seeds), 1e-12), seeds, span)


def share_reached(of_control: Table, of_arm: Table, span: float = 1.0) -> tuple[float, float, float] | None:
    """Return the share of an arm's gain that its control reaches, with Fieller's interval: all shares for which
    `control - share * arm` does not differ significantly from zero. Return None if the interval is too wide."""

    def is_inside(share: float) -> bool:
        pairs = zip(of_control, of_arm, strict=True)
        low, high = effect([[a - share * b for a, b in zip(*rows, strict=True)] for rows in pairs], span).interval
        return low <= 0.0 <= high

    def edge(outside: float) -> float:
        inside = value
        while abs(outside - inside) > 0.001:
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if is_inside(middle) else (inside, middle)
        return inside

    value = fmean(map(fmean, of_control)) / fmean(map(fmean, of_arm))
    if is_inside(value - WIDEST) or is_inside(value + WIDEST):
        return None
    return value, edge(value - WIDEST), edge(value + WIDEST)
