"""Score completions, turning each group into a scored group."""

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter

from trainer.answers import compare
from trainer.answers.find import fenced
from trainer.answers.symbolic import Symbolic
from trainer.config.settings import RIGHT
from trainer.errors import RewardError
from trainer.machine.safe_text import print
from trainer.records import Completion, Prompt, Score, ScoredGroup
from trainer.reward.built_in import COMPONENTS, Reading, Rules, read
from trainer.watch.tally import Mean, Tally, Total

LARGEST = 1e15  # the largest reward; its square fits into a 32-bit float
TESTS = "code"  # the reward that runs tests
FORGOTTEN = 0.9  # by which the share of missing grades that was reported falls with every step without one
Missing = tuple[float, float, str]  # how many grades are missing, of how many, and why


class Meter:
    """A tally of measurements since the last `drain`. Several threads may write."""

    def __init__(self) -> None:
        self._tally = Tally()
        self._writing = threading.Lock()

    def add(self, name: str, amount: float, weight: float = 0.0) -> None:
        """Count `amount` out of `weight`, such as missing grades out of all requested; weight 0 makes a total over all
        ranks, or for seconds the mean of the ranks' totals."""
        with self._writing:
            self._tally.add(name, amount, weight)

    @contextmanager
    def seconds(self, name: str) -> Iterator[None]:
        began = perf_counter()
        yield
        self.add(f"time/reward/{name}", perf_counter() - began)

    def drain(self) -> dict[str, Mean | Total]:
        with self._writing:
            sums, self._tally = self._tally.sums, Tally()
        return {
            name: Mean(amount, weight or 1.0) if weight or name.startswith("time/") else Total(amount)
            for name, (amount, weight) in sums.items()
        }


class Grader(ABC):
    """A reward from outside: tests, a function of the user, or a language model. A grade of None is missing."""

    name: str
    parallel = 1  # how many groups it can usefully grade at once
    last_failure = ""  # why the last missing grade is missing

    @abstractmethod
    def grade(self, readings: Sequence[Reading], meter: Meter) -> list[float | None]: ...

    @abstractmethod
    def rehearse(self, reading: Reading) -> None:
        """Grade one reading before the run, and raise an error if that fails."""


class Scorer:
    """Scores completions by a weighted sum of rewards. It may be called from several threads."""

    def __init__(self, rules: Rules, graders: Sequence[Grader] = (), symbolic: Symbolic | None = None) -> None:
        self.rules, self.graders, self.symbolic = rules, graders, symbolic
        self.meter = Meter()
        self.weights = rules.settings.all_weights
        self.built_in = [name for name in self.weights if name in COMPONENTS]
        self._hangs = 0
        self._missing = 0.0  # the share of missing grades that was reported last

    @property
    def parallel(self) -> int:
        """How many groups it can usefully score at once."""
        return max((grader.parallel for grader in self.graders), default=1)

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> ScoredGroup:
        scores = self.scores((prompt, one) for one in completions)
        return ScoredGroup(prompt, tuple(completions), tuple(scores), self.rules.dead_by)

    def scores(self, answered: Iterable[tuple[Prompt, Completion]]) -> list[Score]:
        with self.meter.seconds("answers"):
            readings = [self.read(prompt, completion) for prompt, completion in answered]
        values: dict[str, Sequence[float | None]] = {}
        for name in self.built_in:
            with self.meter.seconds(name):
                values[name] = [COMPONENTS[name](reading, self.rules) for reading in readings]
        for grader in self.graders:
            with self.meter.seconds(grader.name):
                values[grader.name] = grader.grade(readings, self.meter)
        columns = zip(*values.values()) if values else [()] * len(readings)
        return [self._score(one, dict(zip(values, row))) for one, row in zip(readings, columns, strict=True)]

    def read(self, prompt: Prompt, completion: Completion) -> Reading:
        """Find the answers in a completion, and compare them with the gold answer."""
        return read(prompt, completion, self.rules, self.symbolic.equal if self.symbolic else compare.equal)

    def rehearse(self, prompt: Prompt, completion: Completion) -> None:
        """Call every grader once before the run."""
        reading = self.read(prompt, completion)
        for grader in self.graders:
            grader.rehearse(reading)

    def verifier(self) -> "Scorer":
        """Return a scorer without graders other than the tests, so that evaluation costs nothing."""
        return Scorer(self.rules, tuple(grader for grader in self.graders if grader.name == TESTS), self.symbolic)

    def drain(self) -> dict[str, Mean | Total]:
        """Return what was measured since the last call: seconds of each reward, requests, missing grades, hangs."""
        if self.symbolic is not None:
            hangs, self._hangs = self.symbolic.child.hangs - self._hangs, self.symbolic.child.hangs
            self.meter.add("symbolic/hangs", hangs)
        return self.meter.drain()

    def missing(self, measured: Mapping[str, object]) -> Missing:
        """Return how many of the measured grades are missing, of how many, and why."""
        graded = measured.get("judge/missing")
        if not isinstance(graded, Mean):
            return 0.0, 0.0, ""
        failures = [grader.last_failure.rstrip(".") for grader in self.graders if graded.amount]
        return graded.amount, graded.weight, "; ".join(filter(None, failures))

    def report_missing(self, of_ranks: Sequence[Missing], always: bool = False) -> None:
        """Say how many grades are missing on all ranks and why, and later again when their share has doubled, or
        `always`. The share to compare with falls while none is missing, so a judge that fails again is reported."""
        missing, asked, failures = zip(*of_ranks, strict=True)
        share = sum(missing) / (sum(asked) or 1.0)
        self._missing *= FORGOTTEN if any(asked) and not share else 1.0
        if share > (0.0 if always else 2 * self._missing):
            self._missing = self._missing if always else share
            reasons = "; ".join(dict.fromkeys(filter(None, failures)))  # of several ranks, each once
            ungraded = f"{sum(missing):.0f} of {sum(asked):.0f} completions"
            print(f"octet: the judge gave no grade for {ungraded}: {reasons}.", file=sys.stderr, flush=True)

    def _score(self, reading: Reading, values: Mapping[str, float | None]) -> Score:
        answers = (reading.strict, reading.lenient, reading.correct_strict, reading.correct_lenient)
        if TESTS in values:  # the tests decide whether the program in an answer is right
            block, is_right = fenced(reading.completion.text), values[TESTS] == 1.0
            answers = (block, block, is_right, is_right)
        shaping = {name: value for name, value in values.items() if name not in RIGHT} if self.rules.pays_right else {}
        return Score(total(values, self.weights), values, *answers, total(shaping, self.weights) or 0.0)


def total(values: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum, or None if a value with a weight is missing."""
    summed: float | None = 0.0
    for name, value in values.items():
        weight = weights.get(name, 0.0)
        if value is not None and not abs(value) * max(1.0, abs(weight)) <= LARGEST:  # nan is refused, too
            times = f" times its weight of {weight:g}" if abs(weight) > 1.0 else ""
            reason = f"it is {value:g}{times}, and a reward is at most {LARGEST:g}, because it is squared"
            raise RewardError(f"`{name}`", reason)
        if weight:
            summed = None if value is None or summed is None else summed + weight * value
    return summed
