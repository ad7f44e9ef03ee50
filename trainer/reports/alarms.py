"""When in a run the rules of `watch/diagnosis.py` saw something."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from trainer.watch.diagnosis import Finding, History, diagnose

MOST_RECORDS = 100_000  # that are looked at: each look is at all steps so far, so a long run gets one every few steps


class Alarm(NamedTuple):
    finding: Finding  # as it was seen last
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
    found: dict[str, Alarm] = {}
    ends = looked_at([int(record["step"]) for record in history.steps])
    for step in ends:
        until = [record for record in history.records if record["step"] <= step]
        for finding in diagnose(replace(history, records=until)):
            first = found[finding.rule].first if finding.rule in found else step
            found[finding.rule] = Alarm(finding, first, step, step == ends[-1])
    return sorted(found.values(), key=lambda alarm: (not alarm.lasts, alarm.first))


def looked_at(steps: Sequence[int]) -> list[int]:
    """Return the steps after which a run is looked at: all of up to 632, else evenly spaced ones; always the last."""
    return list(steps[::-1][:: interval(len(steps))][::-1])


def interval(steps: int) -> int:
    """Return the number of steps between two looks."""
    return max(1, steps * steps // (2 * MOST_RECORDS))
