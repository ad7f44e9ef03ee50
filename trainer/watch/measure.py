"""The measure by which an evaluation judges a run: the accuracy of the answers, or their reward if right answers earn
nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.settings import Config
from trainer.records import Score
from trainer.stats import Share, mcnemar, mean_of, paired_difference, share_of


class Measure(NamedTuple):
    """A number that says how good an answer or a model is, with its keys in files and its words in texts."""

    name: str
    of_training: str  # key in metrics.jsonl for training problems
    of_answer: str  # key in a `Score` and in eval_answers.jsonl
    prefix: str  # of `name` and `interval` in eval.json
    logged: str  # key in metrics.jsonl for held-out problems
    noted: tuple[str, ...]  # keys in best.json, and under `eval/` in metrics.jsonl
    row: str  # label of a table's row
    flips: str  # label of the row that counts problems on which two models differ
    flipped: tuple[str, str]  # words for such a problem, seen from the second model
    no_better: str  # says that answers have not improved
    test: str  # name of the significance test

    @property
    def is_reward(self) -> bool:
        return self.name == "reward"

    @property
    def reported(self) -> "Measure":
        """The measure that tables show first: the reward, or the strict accuracy even if the reward is lenient."""
        return self if self.is_reward else STRICT

    @property
    def of_model(self) -> str:
        """The key in eval.json."""
        return f"{self.prefix}{self.name}"

    def values(self, scores: Iterable[Score]) -> list[float]:
        """Return the value of each answer, except answers without a reward."""
        return [float(value) for score in scores if (value := getattr(score, self.of_answer)) is not None]

    def mean(self, values: Sequence[float]) -> Share:
        is_share = not self.is_reward or set(values) <= {0.0, 1.0}
        return share_of(values) if is_share else mean_of(values)[0]

    def text(self, value: float, interval: Sequence[float] = ()) -> str:
        """Return a value with its interval: `62.1% (55.0-68.7)`, or `0.480 [0.410, 0.550]`."""
        if self.is_reward:
            return number(value) + (f" [{number(interval[0])}, {number(interval[1])}]" if interval else "")
        return percent(value, interval) if interval else f"{value:.1%}"

    def pair(self, comparison: Mapping[str, Any], problems: int) -> tuple[Mapping[str, Any], Share]:
        """Return the part of a comparison in eval.json about this measure, and the difference of the two models."""
        if self.is_reward:
            return comparison, Share(comparison["difference"], *comparison["interval"])
        part = comparison["lenient"] if self == LENIENT else comparison
        return part, paired_difference(part["gained"], part["lost"], problems)

    def compared(self, before: Sequence[float], after: Sequence[float]) -> tuple[int, int, float, Share]:
        """Return the numbers of problems with a higher and with a lower value after, p, and the difference."""
        if self.is_reward:
            changes = [new - old for old, new in zip(before, after, strict=True)] or [0.0]
            higher, lower = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
            # A few problems that happen to change equally say little about others, so the error is at least that of
            # the largest change among zeros.
            mean, p = mean_of(changes, max(map(abs, changes)) / len(changes))
            return higher, lower, p, mean
        gained, lost, p = mcnemar([*map(bool, before)], [*map(bool, after)])
        return gained, lost, p, paired_difference(gained, lost, len(before))

    def signed(self, difference: float) -> str:
        """Return a difference without its unit: `+6.2`, in percentage points, or `+0.0410`."""
        return number(difference, "+") if self.is_reward else f"{100 * difference:+.1f}"

    def change(self, difference: Share, of_interval: str = "95 % interval ", unit: str = " points") -> str:
        """Return a difference with its interval. The difference of two accuracies is in percentage points."""
        value, low, high = map(self.signed, difference)
        return f"{value}{'' if self.is_reward else unit} ({of_interval}{low} to {high})"


STRICT = Measure(
    name="accuracy", of_training="accuracy/strict", of_answer="correct_strict", prefix="", logged="eval/accuracy",
    noted=("accuracy", "lenient"), row="correct", flips="gained/lost", flipped=("now right", "no longer right"),
    no_better="are right hardly more often", test="exact McNemar test",
)  # fmt: skip
LENIENT = STRICT._replace(
    of_training="accuracy/lenient", of_answer="correct_lenient", prefix="lenient_", logged="eval/lenient"
)
REWARD = Measure(
    name="reward", of_training="reward/mean", of_answer="reward", prefix="", logged="eval/reward", noted=("reward",),
    row="reward", flips="higher/lower", flipped=("higher reward", "lower reward"), no_better="earn hardly more",
    test="paired t test",
)  # fmt: skip


def number(value: float, sign: str = "") -> str:
    """Return a reward with three significant digits: 0.480, 1.00, 12.3."""
    return f"{value:{sign}#.3g}".rstrip(".")


def measure_of(config: Config, records: Iterable[Mapping[str, Any]] = ()) -> Measure:
    return chosen(config.task.answer, config.reward.weights, config.reward.answer, records)


def chosen(
    task_answer: str | None, weights: Mapping[str, float], paid: str | None, records: Iterable[Mapping[str, Any]] = ()
) -> Measure:
    """Return the measure for the settings `task.answer`, `reward.weights` and `reward.answer`. Earlier versions judged
    a task with gold answers by accuracy, whatever it paid. Their `records`, lines of metrics.jsonl or models of
    eval.json, have no reward."""
    pays_right = weights.get("code") or (task_answer != "none" and weights.get("correct"))
    evaluated = [record for record in records if record.keys() & {"eval/problems", "problems"}]
    if pays_right or (evaluated and not evaluated[-1].keys() & {REWARD.logged, REWARD.name}):
        return LENIENT if paid == "lenient" else STRICT
    return REWARD


def percent(value: float, interval: Sequence[float]) -> str:
    """Return a share with its interval: `62.1% (55.0-68.7)`."""
    return f"{value:.1%} ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})"
