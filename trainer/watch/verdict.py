"""The verdict on a run with its evidence: it learned, it did not learn, or nobody can tell.

Like the rules in `rules.py`, it needs only the files of a run, so a report repeats the verdict that the run printed.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from rich.text import Text

from trainer.config.settings import Config
from trainer.errors import NotLearned, counted
from trainer.stats import SIGNIFICANT, Share, rise
from trainer.watch.measure import STRICT, Measure, measure_of

LEARNED, NOT_LEARNED, CANNOT_TELL = "learned", "did not learn", "cannot tell"
COLOURS = {LEARNED: "bold green", NOT_LEARNED: "bold red", CANNOT_TELL: "bold yellow"}
STATUS = {NOT_LEARNED: 3, CANNOT_TELL: 4}  # of the command, with run.strict_verdict=true
GAIN = 0.02  # of accuracy: a run did not learn if its interval excludes this gain
PART = 10  # the minimum number of first and of last steps whose rewards are compared
RISE = 0.1  # the equivalent of `GAIN` for rewards, as a share of their standard deviation


class Verdict(NamedTuple):
    kind: str
    evidence: str

    @property
    def text(self) -> str:
        return f"{self.kind}: {self.evidence}"

    @property
    def shown(self) -> Text:
        """The verdict for a terminal."""
        return Text(f"verdict: {self.text}", COLOURS[self.kind])

    def must_be_learned(self) -> None:
        """Raise NotLearned with the exit status of this verdict unless the run has learned."""
        if self.kind != LEARNED:
            status = STATUS[self.kind]
            raise NotLearned(f"run.strict_verdict=true: exit status {status}, for `{self.kind}`.", status)


def verdict_of(evaluation: Mapping[str, Any], records: Sequence[Mapping[str, float]], config: Config) -> Verdict:
    """Return the verdict on a run from its eval.json, its metrics.jsonl and its settings."""
    if evaluation.get("comparisons"):
        return _of_evaluation(evaluation, measure_of(config, evaluation["evaluations"][:1]))
    if config.task.curriculum != "none":
        chosen = f"task.curriculum={config.task.curriculum} chooses the problems"
        return Verdict(CANNOT_TELL, f"no final evaluation, and {chosen}, so rewards of different steps say little.")
    return _of_rewards(records, measure_of(config))


def _of_evaluation(evaluation: Mapping[str, Any], measure: Measure) -> Verdict:
    """Compare the trained model with the base on the held-out problems, by the measure that the reward follows."""
    base, trained, *_ = evaluation["evaluations"]
    comparison, difference = measure.pair(evaluation["comparisons"][0], base["problems"])
    p, problems = comparison["p"], comparison.get("problems", base["problems"])
    before, after = comparison.get("rewards") or (base[measure.of_model], trained[measure.of_model])
    evidence = evidence_of(before, after, problems, difference, p, measure)
    if p < SIGNIFICANT and difference.value > 0:
        return Verdict(LEARNED, evidence)
    if measure.is_reward and "loss" in base and not base["deviation"]:  # a warm-up, of which no reward tells anything
        losses = f"{base['loss']:.3g} to {trained['loss']:.3g}"
        return Verdict(CANNOT_TELL, f"{evidence} The loss of a token of the held-out solutions went from {losses}.")
    if problems and (p < SIGNIFICANT or difference.high <= (RISE * base["deviation"] if measure.is_reward else GAIN)):
        return Verdict(NOT_LEARNED, evidence)
    if not (measure.is_reward or base["lenient_accuracy"] or trained["lenient_accuracy"]):
        return Verdict(CANNOT_TELL, f"{evidence} No answer is right, so try easier problems, or a warm-up.")
    more = " More held-out problems narrow the interval: eval.problems, task.holdout." if problems else ""
    return Verdict(CANNOT_TELL, f"{evidence}{more}")


def evidence_of(
    before: float, after: float, problems: int, difference: Share, p: float, measure: Measure = STRICT
) -> str:
    """Return a sentence with two accuracies or rewards on the same problems and their difference."""
    if not problems:
        return "no held-out problem has a grade in both evaluations."
    models = f"{measure.text(before)} -> {measure.text(after)}"
    on_problems = f"held-out reward {models} on {problems} problems"
    of_problems = f"{models} of {problems} held-out problems"
    return f"{on_problems if measure.is_reward else of_problems}, {measure.change(difference)}, p = {p:.2g}."


def _of_rewards(records: Sequence[Mapping[str, float]], measure: Measure) -> Verdict:
    """Compare the rewards on training problems at the end with those at the beginning."""
    steps = [record for record in records if "reward/mean" in record]
    part = len(steps) // 3
    if part < PART:
        count = counted(len(steps), "step")
        return Verdict(CANNOT_TELL, f"no final evaluation, and {count} with a reward; a trend needs {3 * PART}.")
    reward = rise([record["reward/mean"] for record in steps], part)
    right = rise([record.get(measure.of_training, 0.0) for record in steps], part)
    evidence = (
        f"no final evaluation; the mean reward on training problems changed by {reward.value:+.3g} (95 % interval "
        f"{reward.low:+.3g} to {reward.high:+.3g}) from the first {part} steps to the last."
    )
    if right.high < 0 and not measure.is_reward:
        change = f"{100 * right.value:+.1f} points"
        return Verdict(NOT_LEARNED, f"{evidence} The share of right answers changed by {change}.")
    if reward.low > 0:
        return Verdict(LEARNED, evidence)
    spread = fmean(record.get("reward/std", 0.0) for record in steps)
    return Verdict(NOT_LEARNED if reward.high < RISE * spread else CANNOT_TELL, evidence)
