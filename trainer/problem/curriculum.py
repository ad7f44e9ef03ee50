"""Choose the problems of a step. Every rank draws the same ones, and so does a resumed run.

    none         the shuffled set, pass after pass
    difficulty   easy ones first: at the start from the easiest quarter, from half of the run on from all
    solve_rate   problems that are always or never solved are drawn a tenth as often as those solved half the time;
                 without gold answers, the mean reward between the worst and the best of the step is the solve rate

A task that makes up its problems has others in each pass. The first two depend on the seed and the step alone. The
third learns, and keeps what it has learned in its `state`.
"""

import heapq
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from math import ceil, inf
from operator import itemgetter
from statistics import fmean
from typing import Any

from trainer.errors import ConfigError
from trainer.problem.task import draw
from trainer.records import Problem, ScoredGroup

Later = Callable[[int], Sequence[Problem]]  # the problems of the second pass, the third ..., counted from 1
Rates = list[tuple[str, float]]  # problem id -> share of its answers that were right
Outcomes = tuple[str, list[float]]  # problem id -> 0 to 1, or the reward, for each of its answers


class Curriculum:
    """`none`: draw every problem once in a pass."""

    def __init__(
        self, problems: Sequence[Problem], count: int, seed: int, total_steps: int, later: Later | None = None
    ) -> None:
        self.problems = self.order(problems)
        self.count, self.seed, self.total_steps = count, seed, total_steps
        in_order = (lambda passes: self.order(later(passes))) if later else None
        self._later = lru_cache(maxsize=2)(in_order) if in_order else None  # two passes, as sampling ahead draws both
        self.rates: dict[str, float] = {}  # how often each problem was solved, if that is learned

    def order(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        """Return the problems of a pass in the order in which they are drawn from."""
        return problems

    def problems_at(self, step: int) -> Sequence[Problem]:
        passes = step * self.count // len(self.problems)
        return self._later(passes) if self._later and passes else self.problems

    def draw(self, step: int) -> list[Problem]:
        """Return the problems of a step. Steps are counted from 0."""
        return draw(self.problems_at(step), step, self.count, self.seed)

    def spare(self, step: int, number: int) -> list[Problem]:
        """Return as many other problems for a step whose own taught nothing; its own if there are no others."""
        own = {problem.id for problem in self.draw(step)}
        others = [problem for problem in self.pool(step) if problem.id not in own]
        return self._sample(others or self.problems_at(step), random.Random(f"{self.seed}/{step}/{number}"))

    def pool(self, step: int) -> Sequence[Problem]:
        return self.problems_at(step)

    def weight(self, problem_id: str) -> float:
        return 1.0

    def observe(self, rates: Rates) -> None:
        """Take in the solve rates of a step, of the problems of all ranks."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier `state`."""

    def _sample(self, problems: Sequence[Problem], rng: random.Random) -> list[Problem]:
        """Draw a weighted sample without repetition, by exponential variates (Efraimidis and Spirakis 2006)."""
        drawn = list[Problem]()
        while len(drawn) < self.count:  # more than once only if a step has more problems than there are
            keys = [rng.expovariate(self.weight(problem.id)) for problem in problems]
            first = heapq.nsmallest(self.count - len(drawn), range(len(keys)), key=keys.__getitem__)
            drawn += [problems[index] for index in first]
        return drawn


class EasyFirst(Curriculum):
    FIRST_SHARE = 0.25  # of the problems, at the first step
    ALL_FROM = 0.5  # of the run

    def order(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        in_order = sorted(zip(difficulties(problems), problems, strict=True), key=itemgetter(0))
        return [problem for _, problem in in_order]  # those that are equally hard keep their shuffled order

    def draw(self, step: int) -> list[Problem]:
        pool = self.pool(step)
        if self.count >= len(pool):
            return draw(pool, step, self.count, self.seed)
        return random.Random(f"{self.seed}/{step}").sample(pool, self.count)

    def pool(self, step: int) -> Sequence[Problem]:
        progress = min(1.0, step / (self.total_steps * self.ALL_FROM))
        share = self.FIRST_SHARE + (1 - self.FIRST_SHARE) * progress
        problems = self.problems_at(step)
        return problems[: max(self.count, ceil(share * len(problems)))]


class BySolveRate(Curriculum):
    LEAST = 0.1  # weight of a problem that is always or never solved; that may change, so it is not 0
    NEWEST = 0.5  # weight of the newest group in the running solve rate

    def draw(self, step: int) -> list[Problem]:
        return self._sample(self.problems_at(step), random.Random(f"{self.seed}/{step}"))

    def weight(self, problem_id: str) -> float:
        rate = self.rates.get(problem_id)
        return 1.0 if rate is None else self.LEAST + (1 - self.LEAST) * 4 * rate * (1 - rate)

    def observe(self, rates: Rates) -> None:
        for problem_id, rate in rates:
            before = self.rates.get(problem_id, rate)
            self.rates[problem_id] = before + self.NEWEST * (rate - before)

    def state(self) -> dict[str, Any]:
        return {"solve_rates": self.rates}

    def load(self, state: Mapping[str, Any]) -> None:
        self.rates = dict(state["solve_rates"])


CURRICULA: dict[str, type[Curriculum]] = {"none": Curriculum, "difficulty": EasyFirst, "solve_rate": BySolveRate}


def outcomes(groups: Iterable[ScoredGroup], worth: str) -> list[Outcomes]:
    """Return how each answer to each problem did, by an attribute of its score. Missing rewards are left out."""
    found = [(group.prompt.problem.id, [getattr(score, worth) for score in group.scores]) for group in groups]
    return [(problem_id, [float(value) for value in values if value is not None]) for problem_id, values in found]


def solve_rates(seen: Sequence[Outcomes], scales: bool) -> Rates:
    """Return the mean for each problem. With `scales` the worst of all answers is 0 and the best 1, for rewards."""
    values = [value for _, of_one in seen for value in of_one]
    low, high = (min(values), max(values)) if scales and values else (0.0, 1.0)
    return [(problem_id, (fmean(of_one) - low) / (high - low or 1.0)) for problem_id, of_one in seen if of_one]


MEASURES = ("difficulty", "level", "steps")  # columns, the first that some problem has


def difficulties(problems: Sequence[Problem]) -> list[float]:
    """Return the difficulties from a column, else from the lines of the worked solutions; unknown ones are infinite."""
    column = next((name for name in MEASURES if any(problem.extra.get(name) is not None for problem in problems)), None)
    if column:
        numbers = (re.search(r"-?\d+(\.\d+)?", str(problem.extra.get(column))) for problem in problems)
        measured = [float(number[0]) if number else inf for number in numbers]
    else:
        measured = [float(problem.solution.count("\n")) if problem.solution else inf for problem in problems]
    if len(set(measured)) < 2:
        reason = f"nothing tells easy problems from hard ones: no worked solutions, no numbers in {', '.join(MEASURES)}"
        raise ConfigError("task.curriculum=difficulty", reason, "Write task.curriculum=solve_rate, which measures it")
    return measured
