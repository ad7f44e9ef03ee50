"""When in a run the rules of `watch/diagnosis.py` saw something."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from trainer.errors import Finding
from trainer.watch.diagnosis import EARLY, EVALUATED, LATE, MOST, History, diagnose

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


class Column(NamedTuple):
    """What records hold, and the places of the records."""

    places: list[int]
    values: list[Any]

    def between(self, first: int, last: int) -> list[Any]:
        return self.values[bisect_left(self.places, first) : bisect_left(self.places, last)]


class Run:
    """A run whose records are read once, however often the rules look at it."""

    def __init__(self, history: History) -> None:
        self.history, self.columns = history, dict[str, tuple[Column, Column]]()
        self.numbers = [int(record["step"]) for record in history.records]
        self.evaluated = {place for place, record in enumerate(history.records) if EVALUATED in record}

    def seen_after(self, step: int) -> Seen:
        """Return what the rules look at after a step: the first and the last records, and every evaluation."""
        until = bisect_right(self.numbers, step)
        return Seen(self.history.config, self.history.records[:until], self.history.problems, self)

    def part(self, name: str, value: Callable[[Mapping[str, float]], Any], until: int, ends: bool) -> list[Any]:
        if name not in self.columns:
            found = [(place, value(record)) for place, record in enumerate(self.history.records)]
            found = [(place, one) for place, one in found if one is not None]
            evaluated = [pair for pair in found if pair[0] in self.evaluated]
            whole, few = (Column([one[0] for one in pairs], [one[1] for one in pairs]) for pairs in (found, evaluated))
            self.columns[name] = whole, few
        whole, few = self.columns[name]
        late = max(EARLY, until - LATE)
        first, last = whole.between(0, min(EARLY, until)), whole.between(late, until)
        is_enough = ends and len(first) >= MOST and len(last) >= MOST
        return first + last if is_enough else first + few.between(EARLY, late) + last


@dataclass(frozen=True)
class Seen(History):
    """A run until a step."""

    run: Any = None

    @cached_property
    def steps(self) -> list[Mapping[str, float]]:
        own: list[Mapping[str, float]] = self._read("steps", lambda record: record if record["step"] else None, True)
        return own

    def _read(self, name: str, value: Callable[[Mapping[str, float]], Any], ends: bool) -> list[Any]:
        return self.run.part(name, value, len(self.records), ends)


def alarms_of(history: History) -> list[Alarm]:
    """Return every alarm of a run, those that last first."""
    found: dict[str, Alarm] = {}
    ends, run = looked_at([int(record["step"]) for record in history.steps]), Run(history)
    for step in ends:
        for finding in diagnose(run.seen_after(step)):
            first = found[finding.name].first if finding.name in found else step
            found[finding.name] = Alarm(finding, first, step, step == ends[-1])
    return sorted(found.values(), key=lambda alarm: (not alarm.lasts, alarm.first))


def holding(history: History) -> Iterator[str]:
    """Yield what the rules see after the last step, and since when, looking back at most `LOOKS_BACK` steps."""
    steps, late = [int(record["step"]) for record in history.steps], len(history.records) - LATE - LOOKS_BACK - 1
    kept = [one for place, one in enumerate(history.records) if place < EARLY or place >= late or EVALUATED in one]
    now, run = diagnose(history), Run(replace(history, records=kept))
    since = dict.fromkeys((finding.name for finding in now), steps[-1] if steps else 0)
    lasting = {*since}
    for step in steps[-2 : -LOOKS_BACK - 2 : -1]:
        lasting &= {finding.name for finding in diagnose(run.seen_after(step))}
        since |= dict.fromkeys(lasting, step)
        if not lasting:
            break
    more = " or earlier" if len(steps) > LOOKS_BACK + 1 else ""
    for finding in now:
        yield f"since step {since[finding.name]}{more if finding.name in lasting else ''}: {finding}"


def looked_at(steps: Sequence[int]) -> list[int]:
    """Return the steps after which a run is looked at: all, or evenly spaced ones; always the last."""
    return list(steps[::-1][:: interval(len(steps))][::-1])


def interval(steps: int) -> int:
    """Return the number of steps between two looks."""
    return -(-steps // MOST_LOOKS) or 1
