"""What an evaluation measures, by which a run is judged: the accuracy of the answers, or their reward where nothing
says which of them are right."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from trainer.config.settings import Config
from trainer.estimates import Share, mcnemar, mean_of, paired_difference, paired_rewards, share_of
from trainer.records import Score


class Measure(NamedTuple):
    """A number says how good an answer or a model is: its places in files, and how it is written."""

    name: str
    of_training: str  # in metrics.jsonl
    of_answer: str  # in a `Score` and in eval_answers.jsonl
    prefix: str  # of `name` and `interval` in eval.json
    logged: str  # in metrics.jsonl, for held-out problems
    noted: tuple[str, ...]  # in best.json, and under `eval/` in metrics.jsonl
    row: str  # of a table
    flips: str  # of a table: the problems on which two models differ
    flipped: tuple[str, str]  # what such a problem is with the second model
    no_better: str  # of answers
    test: str

    @property
    def is_reward(self) -> bool:
        return self.name == "reward"

    @property
    def reported(self) -> "Measure":
        """What the tables show first: the accuracy in the requested format, whatever is paid, or the reward."""
        return self if self.is_reward else STRICT

    @property
    def of_model(self) -> str:
        return f"{self.prefix}{self.name}"  # in eval.json

    def values(self, scores: Iterable[Score]) -> list[float]:
        """Return the number of each answer, without those that have no reward."""
        return [float(value) for score in scores if (value := getattr(score, self.of_answer)) is not None]

    def mean(self, values: Sequence[float], answers_each: float = 1.0) -> Share:
        is_share = not self.is_reward or set(values) <= {0.0, 1.0}
        return share_of(values, answers_each) if is_share else mean_of(values)[0]

    def text(self, value: float, interval: Sequence[float] = ()) -> str:
        """Return a number with its interval: `62.1% (55.0-68.7)`, or `0.480 [0.410, 0.550]`."""
        if self.is_reward:
            return number(value) + (f" [{number(interval[0])}, {number(interval[1])}]" if interval else "")
        return percent(value, interval) if interval else f"{value:.1%}"

    def pair(self, comparison: Mapping[str, Any], problems: int) -> tuple[Mapping[str, Any], Share]:
        """Return what a comparison of eval.json says of this measure, and the difference of the two models."""
        if self.is_reward:
            return comparison, Share(comparison["difference"], *comparison["interval"])
        found = comparison["lenient"] if self == LENIENT else comparison
        return found, paired_difference(found["gained"], found["lost"], problems)

    def compared(self, before: Sequence[float], after: Sequence[float]) -> tuple[int, int, float, Share]:
        """Return for how many problems the number is higher and lower after, p, and the difference."""
        if self.is_reward:
            moved = [new - old for old, new in zip(before, after, strict=True)]
            return sum(one > 0 for one in moved), sum(one < 0 for one in moved), *paired_rewards(moved)
        gained, lost, p = mcnemar([*map(bool, before)], [*map(bool, after)])
        return gained, lost, p, paired_difference(gained, lost, len(before))

    def change(self, difference: Share, of_interval: str = "95 % interval ", unit: str = " points") -> str:
        """Return a difference with its interval; that of two accuracies is in percentage points."""
        show = partial(number, sign="+") if self.is_reward else lambda share: f"{100 * share:+.1f}"
        value, low, high = map(show, difference)
        return f"{value}{'' if self.is_reward else unit} ({of_interval}{low} to {high})"


_OF_STRICT = ("accuracy", "accuracy/strict", "correct_strict", "", "eval/accuracy", ("accuracy", "lenient"))
_OF_LENIENT = ("accuracy", "accuracy/lenient", "correct_lenient", "lenient_", "eval/lenient", ("accuracy", "lenient"))
_FLIPS = ("correct", "gained/lost", ("now right", "no longer right"), "are right no more often", "exact McNemar test")
STRICT, LENIENT = Measure(*_OF_STRICT, *_FLIPS), Measure(*_OF_LENIENT, *_FLIPS)
_OF_REWARD = ("reward", "reward/mean", "reward", "", "eval/reward", ("reward",))
REWARD = Measure(
    *_OF_REWARD, "reward", "higher/lower", ("higher reward", "lower reward"), "earn no more", "paired t test"
)


def number(value: float, sign: str = "") -> str:
    """Return a reward with three digits that count: 0.480, 1.00, 12.3."""
    return f"{value:{sign}#.3g}".rstrip(".")


def measure_of(config: Config) -> Measure:
    return chosen(config.task.answer, config.reward.weights, config.reward.answer)


def chosen(task_answer: str | None, weights: Iterable[str], paid: str | None) -> Measure:
    """Return the measure for the settings `task.answer`, `reward.weights` and `reward.answer`."""
    if task_answer == "none" and "code" not in weights:  # whose tests say what is right
        return REWARD
    return LENIENT if paid == "lenient" else STRICT


def percent(value: float, interval: Sequence[float]) -> str:
    """Return a share with its interval: `62.1% (55.0-68.7)`."""
    return f"{value:.1%} ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})"
