"""Choose the problems of a step. Every rank and every resumed run choose the same ones.

    none         the shuffled set, pass after pass
    difficulty   easy problems first: at the start from the easiest quarter, from the middle of the run from all
    solve_rate   problems that are always or never solved are drawn a tenth as often as those solved half the time

A task that generates its problems has new ones in each pass. The first two curricula depend on the seed and the step
alone. The third learns from the run, and keeps the solve rates in its `state`.
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

Later = Callable[[int], Sequence[Problem]]  # the problems of each later pass: 1 is the second pass
Rates = list[tuple[str, float]]  # problem id, and the share of its answers that were right
Outcomes = tuple[str, list[float]]  # problem id, and for each of its answers a reward, or 1 for right and 0 for wrong
MEASURES = ("difficulty", "level", "steps")  # columns that may hold the difficulty; the first with a number
NUMBER = re.compile(r"(?:(?<!\w)-)?\d+(\.\d+)?(e[+-]?\d+)?")  # the 1 of level-1 is not negative


class Curriculum:
    """`none`: draw every problem once in a pass."""

    def __init__(
        self, problems: Sequence[Problem], count: int, seed: int, total_steps: int, later: Later | None = None
    ) -> None:
        self.problems = self.order(problems)
        self.count, self.seed, self.total_steps = count, seed, total_steps
        # sampling ahead draws from two passes at the same time
        self._later = lru_cache(maxsize=2)(lambda passes: self.order(later(passes))) if later else None
        self.rates: dict[str, float] = {}  # running solve rates by problem id; only `solve_rate` fills them

    def order(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        """Return the problems of a pass in the order that this curriculum draws from."""
        return problems

    def problems_at(self, step: int) -> Sequence[Problem]:
        passes = step * self.count // len(self.problems)
        return self._later(passes) if self._later and passes else self.problems

    def pool(self, step: int) -> Sequence[Problem]:
        """Return the problems that a step may draw."""
        return self.problems_at(step)

    def draw(self, step: int) -> list[Problem]:
        """Return the problems of a step. Steps are counted from 0."""
        return draw(self.pool(step), step, self.count, self.seed)

    def spare(self, step: int, number: int) -> list[Problem]:
        """Return other problems for a step whose own taught nothing, of its `pool`, or of all if it drew the whole
        pool. `number` counts the refills."""
        drawn = {problem.id for problem in self.draw(step)}
        others = [problem for problem in self.pool(step) if problem.id not in drawn]
        return self._sample(others or self.problems_at(step), random.Random(f"{self.seed}/{step}/{number}"))

    def weight(self, problem_id: str) -> float:
        return 1.0

    def observe(self, rates: Rates) -> None:
        """Learn from the solve rates of a step, which cover the problems of all ranks."""

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore an earlier `state`."""

    def _sample(self, problems: Sequence[Problem], rng: random.Random) -> list[Problem]:
        """Draw a weighted sample without repetition, by exponential variates (Efraimidis and Spirakis 2006)."""
        drawn = list[Problem]()
        while len(drawn) < self.count:  # repeats only if a step needs more problems than there are
            keys = [rng.expovariate(self.weight(problem.id)) for problem in problems]
            first = heapq.nsmallest(self.count - len(drawn), range(len(keys)), key=keys.__getitem__)
            drawn += [problems[index] for index in first]
        return drawn


class EasyFirst(Curriculum):
    FIRST_SHARE = 0.25  # the share of the problems that the first step draws from
    ALL_FROM = 0.5  # the share of the run after which all problems are drawn from

    def order(self, problems: Sequence[Problem]) -> Sequence[Problem]:
        """Return the problems by difficulty. Each part of a mixture has its own measure, and is spread over all."""
        names = dict.fromkeys(problem.part for problem in problems)
        parts = [[problem for problem in problems if problem.part == name] for name in names]
        measured = [difficulties(part) for part in parts]
        if not any(len(set(one)) > 1 for one in measured):
            reason = f"numbers in {', '.join(MEASURES)}, or else the lines of worked solutions, are alike or missing"
            remedy = "Write task.curriculum=solve_rate, which measures it"
            raise ConfigError("task.curriculum=difficulty", reason, remedy)
        # the sorts are stable: equally hard problems stay shuffled
        ranked = [sorted(zip(*both, strict=True), key=itemgetter(0)) for both in zip(measured, parts, strict=True)]
        placed = [(place / len(part), one) for part in ranked for place, (_, one) in enumerate(part)]
        return [problem for _, problem in sorted(placed, key=itemgetter(0))]

    def draw(self, step: int) -> list[Problem]:
        pool = self.pool(step)
        if self.count >= len(pool):
            return super().draw(step)
        return random.Random(f"{self.seed}/{step}").sample(pool, self.count)

    def pool(self, step: int) -> Sequence[Problem]:
        progress = min(1.0, step / (self.total_steps * self.ALL_FROM))
        share = self.FIRST_SHARE + (1 - self.FIRST_SHARE) * progress
        problems = self.problems_at(step)
        return problems[: max(self.count, ceil(share * len(problems)))]


class BySolveRate(Curriculum):
    LEAST = 0.1  # weight of a problem that is always or never solved; above 0, because its solve rate may change
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
    """Return the attribute `worth` of the score of each answer, problem by problem. Missing rewards are left out."""
    values = [(group.prompt.problem.id, [getattr(score, worth) for score in group.scores]) for group in groups]
    return [(problem_id, [float(one) for one in of_problem if one is not None]) for problem_id, of_problem in values]


def solve_rates(seen: Sequence[Outcomes], scales: bool) -> Rates:
    """Return the mean of each problem. `scales`, for rewards, maps the worst of all answers to 0 and the best to 1."""
    values = [value for _, of_problem in seen for value in of_problem]
    low, high = (min(values), max(values)) if scales and values else (0.0, 1.0)
    return [(problem_id, (fmean(ours) - low) / (high - low or 1.0)) for problem_id, ours in seen if ours]


def difficulties(problems: Sequence[Problem]) -> list[float]:
    """Return difficulties: numbers of a column, or else lengths of the worked solutions in lines; inf if unknown."""
    for column in MEASURES:
        numbers = [NUMBER.search(str(problem.extra.get(column))) for problem in problems]
        if any(numbers):
            return [float(number[0]) if number else inf for number in numbers]
    return [float(problem.solution.count("\n")) if problem.solution else inf for problem in problems]
