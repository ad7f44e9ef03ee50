"""Alarms: what the rules have seen in a run, and when."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainer.errors import EndedByAlarm, Finding, TrainingError
from trainer.watch.history import History, kept
from trainer.watch.rules import RULES, Rule

QUIET = 10  # steps without a finding, after which it is printed again
MOST_LOOKS = 500  # at a run; a longer one is looked at every few steps
LOOKS_BACK = 50  # steps, for the beginning of an alarm that lasts: it is looked for again after each step


def diagnose(history: History, rules: Iterable[Rule] = RULES) -> list[Finding]:
    """Return what the rules have seen after the last step."""
    if not history.steps:
        return []
    found = ((rule, rule.looks(history)) for rule in rules)
    return [Finding(rule.severity, rule.name, seen, rule.remedy, rule.why) for rule, seen in found if seen]


class Alarms:
    """Prints what the rules see as a run goes on: once while it lasts, and again if it returns after `QUIET` steps."""

    def __init__(self, history: History, say: Callable[[str], None], rules: Sequence[Rule] = RULES) -> None:
        self.history = history
        self.records = kept(history.records)
        self.say = say
        self.rules = rules
        self.last_seen: dict[str, int] = {}

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Look at a run after a step. Raise TrainingError to end it, EndedByAlarm with run.strict_health."""
        self.records = kept([*self.records, {"step": step, **metrics}])
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
    """A finding as it was seen last, with the first and the last step at which it was seen."""

    finding: Finding
    first: int
    last: int
    lasts: bool  # until the last step

    @property
    def when(self) -> str:
        if self.lasts:
            return f"since step {self.first}"
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"


def alarms_of(history: History) -> list[Alarm]:
    """Return every alarm of a run, those that last first."""
    steps = [int(record["step"]) for record in history.steps]
    return _seen_at(history, steps[::-1][:: interval(len(steps))])


def interval(steps: int) -> int:
    """Return the number of steps between two looks at a run."""
    return -(-steps // MOST_LOOKS) or 1


def lasting(history: History) -> list[str]:
    """Return what the rules see after the last step, and since when, looking back at most `LOOKS_BACK` steps."""
    steps = [int(record["step"]) for record in history.steps[-LOOKS_BACK - 1 :]]
    is_whole = len(steps) == len(history.steps)
    return [
        f"{alarm.when}{' or earlier' if alarm.first == steps[0] and not is_whole else ''}: {alarm.finding}"
        for alarm in _seen_at(history, steps)
        if alarm.lasts
    ]


def _seen_at(history: History, steps: Iterable[int]) -> list[Alarm]:
    """Look at a run as it was after each of these steps."""
    found: dict[str, Alarm] = {}
    looks, records = {*steps}, history.records
    begin = next((place for place, one in enumerate(records) if one["step"] in looks), len(records))
    window = kept(records[:begin])
    for record in records[begin:]:
        window, step = kept([*window, record]), int(record["step"])
        for finding in diagnose(replace(history, records=window)) if step in looks else ():
            first = found[finding.name].first if finding.name in found else step
            found[finding.name] = Alarm(finding, first, step, step == records[-1]["step"])
    return sorted(found.values(), key=lambda alarm: (not alarm.lasts, alarm.first))
