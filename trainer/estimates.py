"""Statistics: shares, intervals, pass@k, paired tests, Holm's correction, Student's t, and the arms of a study."""

from collections.abc import Sequence
from functools import lru_cache
from math import comb, fsum, sqrt
from statistics import NormalDist, fmean, pvariance, stdev, variance
from typing import NamedTuple

CONFIDENCE = 0.95
Z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
SIGNIFICANT = 0.05
LEAST_SEEDS = 3  # the spread over fewer seeds says too little about other seeds
POWER = 0.8  # if the spread of the seeds were known
FOUND = 0.7  # with the spread of a few seeds, in simulations
WIDEST = 4.0  # an interval of a share that reaches further says nothing

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
    """Return the mean of one value between 0 and 1 for each problem, with a Wilson interval. Eight answers to one
    problem are not eight independent answers. The interval uses the number of independent answers that would have the
    same variance, `mean * (1 - mean) / (variance over problems / problems)`. It equals the number of problems if all
    answers to a problem agree, so for one answer each the interval is exactly Wilson's. It is at most `answers_each`
    times the number of problems, which it reaches if problems do not differ. If every value is 0, or every value is 1,
    it is the number of problems."""
    mean, variance = fmean(values), pvariance(values)
    independent: float = len(values)
    if 0 < mean < 1:
        most = len(values) * max(1.0, answers_each)
        independent = min(most, mean * (1 - mean) * len(values) / variance) if variance else most
    return Share(mean, *wilson(mean * independent, independent))


def pass_at(k: int, answers: int, correct: int) -> float:
    """Return the probability that at least one of k answers, drawn without replacement, is right. Chen et al. 2021,
    equation 1. It is unbiased; 1 - (1 - accuracy) ** k is not."""
    return 1 - comb(answers - correct, k) / comb(answers, k)


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """Return the problems gained, the problems lost, and the p-value of the exact McNemar test."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    return gained, lost, _exact(gained, lost)


def visible_gain(problems: int) -> float | None:
    """Return the smallest gain that McNemar's test finds if one right problem in twenty turns wrong; or None."""
    lost = round(problems / 20)
    gained = next((count for count in range(lost, problems - lost + 1) if _exact(count, lost) < SIGNIFICANT), None)
    return None if gained is None else (gained - lost) / problems


def what_shows(problems: int) -> str:
    gain = visible_gain(problems)
    return f"which show a gain of {100 * gain:.0f} points or more" if gain else "too few to show any gain"


@lru_cache(maxsize=1024)
def _exact(gained: int, lost: int) -> float:
    flipped = gained + lost
    tail = sum(comb(flipped, k) for k in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**flipped)


def paired_difference(gained: int, lost: int, problems: int) -> Share:
    """Return the difference of two accuracies on the same problems. Wald's interval for paired shares with half a
    problem added to each of the four cells (Agresti and Min 2005) and a continuity correction. Where it leaves 0 out
    and the exact McNemar test does not, or the other way round, which it may by the last digit, its end is moved across
    0."""
    total = problems + 2
    middle = (gained - lost) / total
    half = Z * sqrt(gained + lost + 1 - (gained - lost) ** 2 / total) / total + 1 / problems
    is_significant = _exact(gained, lost) < SIGNIFICANT
    if is_significant != (half < abs(middle)):
        half = abs(middle) * (0.999 if is_significant else 1.001)
    return Share((gained - lost) / problems, max(-1.0, middle - half), min(1.0, middle + half))


def mean_of(values: Sequence[float], least_error: float = 0.0) -> tuple[Share, float]:
    """Return the mean of a number for each problem with Student's interval, and p of the hypothesis that it is 0."""
    mean, freedom = fmean(values), max(1, len(values) - 1)
    error = max(least_error, stdev(values) / sqrt(len(values)) if len(values) > 1 else abs(mean))
    half = error * quantile((1 + CONFIDENCE) / 2, freedom)
    return Share(mean, mean - half, mean + half), two_sided(mean / error, freedom) if error else float(not mean)


def paired_rewards(changes: Sequence[float]) -> tuple[float, Share]:
    """Return p of the paired t test of the rewards of the same problems, by their changes, and the mean change. The
    error is at least what one problem with the largest change, among others without any, would give: a few problems
    that happen to rise by the same say little about others."""
    moved = changes or [0.0]
    mean, p = mean_of(moved, max(map(abs, moved)) / len(moved))
    return p, mean


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


def rise(values: Sequence[float], part: int) -> Share:
    """Return by how much the mean of the last values is above that of the first, with Welch's interval."""
    first, last = values[:part], values[-part:]
    one, other = variance(first), variance(last)
    freedom = (part - 1) * (one + other) ** 2 / (one**2 + other**2) if one or other else part - 1
    half = quantile((1 + CONFIDENCE) / 2, int(freedom)) * sqrt((one + other) / part)
    change = fmean(last) - fmean(first)
    return Share(change, change - half, change + half)


# How much two arms of a study differ, for other seeds and for other problems than those that were seen.
#
# Every arm is trained with the same seeds and asked the same problems, so two arms have a difference for each seed and
# problem: 1, 0 or -1 where each answer is right or wrong. Seeds and problems are both samples, which cross: a seed
# shifts all problems of its run, and a problem is easier for one arm in all its runs. The variance of the mean
# difference is the sum of a part of the seeds, one of the problems and one of what is left (the analysis of variance
# of two crossed random factors), and the t distribution has Satterthwaite's degrees of freedom. `bench/coverage.py`
# shows by simulation how often the intervals contain the truth.


class Effect(NamedTuple):
    """A difference of two accuracies."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom of the t distribution
    error_of_seeds: float  # standard error of the mean of so many seeds, on these problems
    seeds: int

    @property
    def p(self) -> float:
        """Return the larger of two p-values: of seeds and problems together, and of the seeds alone. With few seeds the
        first is too small where the seeds differ by more than their sample shows."""
        of_seeds = two_sided(self.value / self.error_of_seeds, self.seeds - 1)
        return max(two_sided(self.value / self.error, self.freedom), of_seeds)

    @property
    def interval(self) -> tuple[float, float]:
        half = self.error * quantile((1 + CONFIDENCE) / 2, self.freedom)
        return max(-1.0, self.value - half), min(1.0, self.value + half)

    def detectable(self, comparisons: int = 1) -> float:
        """Return a difference that a study of this size, with so many comparisons, finds with a probability of about
        `FOUND`, even if none of the others is found."""
        level = 1 - (1 - CONFIDENCE) / comparisons / 2
        tests = ((self.error, self.freedom), (self.error_of_seeds, self.seeds - 1))
        return max(error * (quantile(level, freedom) + quantile(POWER, freedom)) for error, freedom in tests)


def effect(differences_SP: Table) -> Effect:
    """Return the mean difference over at least two seeds and two problems."""
    seeds, problems = len(differences_SP), len(differences_SP[0])
    of_seeds = [fsum(row) / problems for row in differences_SP]
    of_problems = [fsum(column) / seeds for column in zip(*differences_SP, strict=True)]
    mean = fsum(of_seeds) / seeds
    by_seed, by_problem = problems * variance(of_seeds, mean), seeds * variance(of_problems, mean)
    squares = fsum((value - mean) ** 2 for row in differences_SP for value in row)
    rest = squares - by_seed * (seeds - 1) - by_problem * (problems - 1)
    rest = max(0.0, rest) / ((seeds - 1) * (problems - 1))
    of_seed = max(0.0, by_seed - rest)  # what seeds add to the noise of single answers
    spread = by_problem + of_seed
    error = max(sqrt(spread / seeds / problems), 1 / problems)  # never less than one problem
    # The seeds count even where they add nothing here: a few that happen to agree say little about others
    parts = by_seed**2 / (seeds - 1) + by_problem**2 / (problems - 1)
    freedom = min(max(spread**2 / parts, seeds - 1), problems - 1) if parts else problems - 1
    return Effect(mean, error, freedom, max(stdev(of_seeds) / sqrt(seeds), 1e-12), seeds)


def is_enough(differences_SP: Table) -> bool:
    """Return True for enough seeds and problems to say how much others differ."""
    return len(differences_SP) >= LEAST_SEEDS and len(differences_SP[0]) > 1


def share_reached(of_control: Table, of_arm: Table) -> tuple[float, float, float] | None:
    """Return which share of the gain of an arm its control reaches, with an interval; None if it has no end. Fieller's
    interval: all shares for which `control - share * arm` does not differ from zero."""

    def is_inside(share: float) -> bool:
        pairs = zip(of_control, of_arm, strict=True)
        low, high = effect([[a - share * b for a, b in zip(*rows, strict=True)] for rows in pairs]).interval
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
