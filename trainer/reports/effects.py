"""How much two arms of a study differ, for other seeds and for other problems than those that were seen.

Every arm is trained with the same seeds and asked the same problems, so two arms have a difference for each seed and
problem: 1, 0 or -1 where each answer is right or wrong. Seeds and problems are both samples, which cross: a seed
shifts all problems of its run, and a problem is easier for one arm in all its runs. The variance of the mean
difference is the sum of a part of the seeds, one of the problems and one of what is left (the analysis of variance of
two crossed random factors), and the t distribution has Satterthwaite's degrees of freedom. `bench/coverage.py` shows
by simulation how often the intervals contain the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, sqrt
from statistics import fmean, stdev, variance
from typing import NamedTuple

from trainer.estimates import CONFIDENCE, quantile, two_sided

Table = Sequence[Sequence[float]]  # a row for each seed, with a number for each problem
LEAST_SEEDS = 3  # the spread over fewer seeds says too little about other seeds
POWER = 0.8  # if the spread of the seeds were known
FOUND = 0.7  # with the spread of a few seeds, in simulations
WIDEST = 4.0  # an interval of a share that reaches further says nothing


class Effect(NamedTuple):
    """A difference of two accuracies."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom of the t distribution
    error_of_seeds: float  # standard error of the mean of so many seeds, on these problems
    seeds: int

    @property
    def p(self) -> float:
        """Return the larger of two p-values: of seeds and problems together, and of the seeds alone.

        With few seeds the first is too small where the seeds differ by more than their sample shows.
        """
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
    """Return which share of the gain of an arm its control reaches, with an interval; None if it has no end.

    Fieller's interval: all shares for which `control - share * arm` does not differ from zero.
    """

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
