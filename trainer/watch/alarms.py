"""Alarms: the findings of the rules in a run, and the steps at which they appeared."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainer.errors import EndedByAlarm, Finding, TrainingError
from trainer.watch.history import History
from trainer.watch.rules import RULES, Rule

QUIET = 10  # steps without a finding, after which it is printed again
MOST_LOOKS = 500  # diagnoses of one run; a longer run is diagnosed every few steps
LOOKS_BACK = 50  # steps that are searched for the beginning of a lasting alarm, after each step


def diagnose(history: History, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """Return the findings of the rules after the last step."""
    if not history.steps:
        return []
    rate = "warmup.lr" if history.config.is_warmup else "algorithm.lr"  # which a warm-up replaces by its own
    return [
        Finding(rule.severity, rule.name, seen, rule.remedy.replace("algorithm.lr", rate), rule.why)
        for rule in rules
        for seen in rule.looks(history)
    ]


class Alarms:
    """Prints the findings of the rules during a run: once while they last, and again after `QUIET` steps without."""

    def __init__(self, history: History, say: Callable[[str], None], rules: Sequence[Rule] = RULES) -> None:
        self.history = history
        self.records = history.kept(history.records)
        self.say = say
        self.rules = rules
        self.last_seen: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Diagnose the run after a step. Raise TrainingError to end it, EndedByAlarm with run.strict_health."""
        self.records = self.history.kept([*self.records, {"step": step, **metrics}])
        findings = diagnose(replace(self.history, records=self.records), self.rules)
        for finding in findings:
            if finding.severity == "end":
                reason = f"{finding.name}: {finding.seen}. {finding.why}"
                raise TrainingError(f"step {step}", reason, finding.remedy).of_all()
            if step - self.last_seen.get(finding.name, -QUIET) >= QUIET:
                self.say(f"step {step}: {finding}")
            self.last_seen[finding.name] = step
        if findings and self.history.config.run.strict_health:
            raise EndedByAlarm("run.strict_health=true", f"the run ends at this alarm of step {step}")

    def evaluation(self, metrics: Mapping[str, float]) -> None:
        """Add an evaluation after the last step."""
        if self.records:
            self.records[-1] = {**self.records[-1], **metrics}


class Alarm(NamedTuple):
    """A finding in its latest wording, with the first and the last step at which it appeared."""

    finding: Finding
    first: int
    last: int
    lasts: bool  # True if `last` is the last step of the run

    @property
    def when(self) -> str:
        if self.lasts:
            return f"since step {self.first}"
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def alarms_of(history: History) -> list[Alarm]:
    """Return every alarm of a run, beginning with lasting ones."""
    steps = [int(record["step"]) for record in history.steps]
    return _seen_at(history, steps[::-1][:: interval(len(steps))])


def interval(steps: int) -> int:
    """Return the number of steps between two diagnoses of a run."""
    return -(-steps // MOST_LOOKS) or 1


def lasting(history: History) -> list[str]:
    """Return the findings after the last step with their first step, which is at most `LOOKS_BACK` steps earlier."""
    steps = [int(record["step"]) for record in history.steps[-LOOKS_BACK - 1 :]]
    is_whole = len(steps) == len(history.steps)
    return [
        f"{alarm.when}{' or earlier' if alarm.first == steps[0] and not is_whole else ''}: {alarm.finding}"
        for alarm in _seen_at(history, steps)
        if alarm.lasts
    ]


def _seen_at(history: History, steps: Iterable[int]) -> list[Alarm]:
    """Diagnose a run as it was after each of these steps."""
    alarms: dict[str, Alarm] = {}
    looks, records = {*steps}, history.records
    begin = next((index for index, record in enumerate(records) if record["step"] in looks), len(records))
    window = history.kept(records[:begin])
    for record in records[begin:]:
        window, step = history.kept([*window, record]), int(record["step"])
        for finding in diagnose(replace(history, records=window)) if step in looks else ():
            first = alarms[finding.name].first if finding.name in alarms else step
            alarms[finding.name] = Alarm(finding, first, step, step == records[-1]["step"])
    return sorted(alarms.values(), key=lambda alarm: (not alarm.lasts, alarm.first))
