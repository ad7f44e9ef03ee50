"""A chart of differences with their intervals, one below the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.machine.visible import visible
from trainer.reports.chart import BOTTOM, LETTER, RIGHT, WIDTH, ticks
from trainer.reports.drawing import COLOURS, Dot, Hit, Label, Line, Mark

ROW = 18.0  # height of an arm
HEAD = 26.0  # height of the title
SPARE = 0.01  # of accuracy, beside the widest interval
GREY = "#888888"


def forest(title: str, judged: Sequence[Mapping[str, Any]], undecided: str) -> tuple[list[Mark], float, float]:
    """Return the chart of comparisons that have an interval, its width and its height. What is decided has a colour."""
    left = LETTER * max(len(one["arm"]) for one in judged) + 12
    low, high = min(0.0, *(one["low"] for one in judged)) - SPARE, max(0.0, *(one["high"] for one in judged)) + SPARE
    bottom = HEAD + ROW * len(judged)

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - RIGHT - left)

    def marks() -> Iterator[Mark]:
        yield Label(4, 15, title, size=13)
        for value in ticks(low, high):
            yield Line([(across(value), HEAD), (across(value), bottom)], width=1, opacity=0.5 if value == 0 else 0.15)
            yield Label(across(value), bottom + 16, f"{100 * value:+.0f}" if value else "0", anchor="middle")
        for place, one in enumerate(judged):
            y = HEAD + ROW * (place + 0.5)
            colour = GREY if one["verdict"] == undecided else COLOURS[0 if one["difference"] > 0 else 1]
            yield Label(left - 8, y + 4, visible(one["arm"]), anchor="end")
            yield Line([(across(one["low"]), y), (across(one["high"]), y)], colour)
            yield Dot(across(one["difference"]), y, colour)
            said = f"{100 * one['difference']:+.1f} ({100 * one['low']:+.1f} to {100 * one['high']:+.1f})"
            yield Hit(0, y - ROW / 2, WIDTH, ROW, f"{one['arm']}: {said}, {one['verdict']}")

    return [*marks()], WIDTH, bottom + BOTTOM
