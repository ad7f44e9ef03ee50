"""When in a run the rules of `watch/diagnosis.py` saw something."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from trainer.watch.diagnosis import EARLY, EVALUATED, LATE, Finding, History, diagnose

MOST_LOOKS = 500  # at a run; a longer one is looked at every few steps
LOOKS_BACK = 50  # steps, for the beginning of an alarm that holds: it is looked for again after each step


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
        for finding in diagnose(replace(history, records=seen_by(history.records, step))):
            first = found[finding.rule].first if finding.rule in found else step
            found[finding.rule] = Alarm(finding, first, step, step == ends[-1])
    return sorted(found.values(), key=lambda alarm: (not alarm.lasts, alarm.first))


def holding(history: History) -> Iterator[str]:
    """Yield what the rules see after the last step, and since when, looking back at most `LOOKS_BACK` steps."""
    steps = [int(record["step"]) for record in history.steps]
    now = diagnose(history)
    since = dict.fromkeys((finding.rule for finding in now), steps[-1] if steps else 0)
    lasting = {*since}
    for step in steps[-2 : -LOOKS_BACK - 2 : -1]:
        lasting &= {finding.rule for finding in diagnose(replace(history, records=seen_by(history.records, step)))}
        since |= dict.fromkeys(lasting, step)
        if not lasting:
            break
    more = " or earlier" if len(steps) > LOOKS_BACK + 1 else ""
    for finding in now:
        yield f"since step {since[finding.rule]}{more if finding.rule in lasting else ''}: {finding.text}"


def seen_by(records: Sequence[Mapping[str, float]], step: int) -> list[Mapping[str, float]]:
    """Return what the rules look at after a step: the first and the last records, and every evaluation."""
    until = bisect_right(records, step, key=lambda record: int(record["step"]))
    first, last = records[: min(EARLY, until)], records[max(EARLY, until - LATE) : until]
    evaluated = (record for record in records[EARLY : max(EARLY, until - LATE)] if EVALUATED in record)
    return [*first, *evaluated, *last]


def looked_at(steps: Sequence[int]) -> list[int]:
    """Return the steps after which a run is looked at: all, or evenly spaced ones; always the last."""
    return list(steps[::-1][:: interval(len(steps))][::-1])


def interval(steps: int) -> int:
    """Return the number of steps between two looks."""
    return -(-steps // MOST_LOOKS) or 1
