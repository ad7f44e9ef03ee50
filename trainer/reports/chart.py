"""A chart: curves over steps, bands where a value has a range, and the numbers of each step to hover over."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import fmean
from typing import NamedTuple

from trainer.machine.visible import visible
from trainer.reports.drawing import COLOURS, Area, Dot, Hit, Label, Line, Mark

WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 10.0, 26.0, 24.0  # margins
LEGEND = 14.0  # height
MOST_POINTS = 200  # of a curve; the steps between are averaged
LETTER = 6.0  # mean width of a letter of a label


class Value(NamedTuple):
    """A value at a step, and the range around it."""

    step: float
    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    name: str
    values: Sequence[Value]
    colour: int = 0
    dots: bool = False

    @property
    def paint(self) -> str:
        return COLOURS[self.colour % len(COLOURS)]


@dataclass(frozen=True)
class Chart:
    """One or more curves, none of them empty."""

    title: str
    curves: Sequence[Curve]
    percent: bool = False
    legend: bool = True
    across: str = "step"  # what the numbers below the chart are

    def write(self, number: float) -> str:
        return f"{number:.3g}" if not self.percent else f"{number:.0%}"

    def marks(self, x: float = 0.0, y: float = 0.0) -> list[Mark]:
        """Return the chart with its upper left corner at a place."""
        has_legend = self.legend and len(self.curves) > 1
        frame = Frame(self.curves, x, y, TOP + LEGEND * has_legend)
        title, legend = Label(x + 4, y + 15, self.title, size=13), self._legend(x, y) if has_legend else ()
        return [title, *legend, *self._axes(frame), *self._drawn(frame), *self._hits(frame)]

    def _legend(self, x: float, y: float) -> Iterator[Label]:
        at = x + LEFT
        for curve in self.curves:
            yield Label(at, y + 31, visible(curve.name), curve.paint)
            at += LETTER * (len(curve.name) + 2)

    def _axes(self, frame: Frame) -> Iterator[Mark]:
        for value in ticks(frame.low, frame.high):
            level = frame.down(value)
            yield Line([(frame.left, level), (frame.right, level)], width=1, opacity=0.15)
            yield Label(frame.left - 6, level + 4, self.write(value), anchor="end")
        near = (frame.last - frame.first) / 10  # where a label would be written over that of the first step
        whole = [step for step in ticks(frame.first, frame.last) if step == round(step) and step > frame.first + near]
        for place, step in enumerate([frame.first, *whole]):
            text = f"{step:.0f}" if place else f"{self.across} {step:.0f}"
            yield Label(frame.across(step), frame.bottom + 16, text, anchor="middle")

    def _drawn(self, frame: Frame) -> Iterator[Mark]:
        for curve in self.curves:
            ends = [(frame.across(one.step), frame.down(one.low), frame.down(one.high)) for one in curve.values]
            if any(low != high for _, low, high in ends):
                yield Area([(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)], curve.paint)
        for curve in self.curves:
            points = [(frame.across(one.step), frame.down(one.middle)) for one in curve.values]
            yield Line(points, curve.paint)
            if curve.dots or len(points) == 1:
                yield from (Dot(*point, curve.paint) for point in points)

    def _hits(self, frame: Frame) -> Iterator[Hit]:
        said = defaultdict(list)
        for curve in self.curves:
            for one in curve.values:
                around = f" ({self.write(one.low)} to {self.write(one.high)})" if one.low != one.high else ""
                said[one.step].append(f"{curve.name}: {self.write(one.middle)}{around}")
        width = (frame.right - frame.left) / max(1, len(said) - 1)
        for step, lines in said.items():
            place = frame.across(step) - width / 2, frame.top, width, frame.bottom - frame.top
            yield Hit(*place, "\n".join([f"{self.across} {step:.0f}", *lines]))


class Frame:
    """Places the values of a chart. Zero is always on it, so that a small change looks small."""

    def __init__(self, curves: Sequence[Curve], x: float, y: float, top: float) -> None:
        values = [value for curve in curves for value in curve.values]
        self.first, self.last = min(value.step for value in values), max(value.step for value in values)
        low, high = min(0.0, *(value.low for value in values)), max(0.0, *(value.high for value in values))
        spare = (high - low or 1.0) / 20
        self.low, self.high = low - spare * (low < 0), high + spare * (high > 0 or low == 0)
        self.left, self.right, self.top, self.bottom = x + LEFT, x + WIDTH - RIGHT, y + top, y + HEIGHT - BOTTOM

    def across(self, step: float) -> float:
        return self.left + (step - self.first) / (self.last - self.first or 1.0) * (self.right - self.left)

    def down(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two."""
    rough = (high - low or 1.0) / 5
    size = 10.0 ** floor(log10(rough))
    width = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = -floor(-low / width)
    return [float(f"{place * width:.6g}") for place in range(first, floor(high / width) + 1)]


def thinned(values: Sequence[Value]) -> list[Value]:
    """Leave out what is not finite, and average neighbours where there are more than can be seen."""
    finite = [value for value in values if all(map(isfinite, value))]
    size = -(-len(finite) // MOST_POINTS) or 1
    return [_together(finite[start : start + size]) for start in range(0, len(finite), size)]


def _together(values: Sequence[Value]) -> Value:
    if len(values) == 1:
        return values[0]
    middle, low, high = (fmean(value[place] for value in values) for place in (1, 2, 3))
    return Value(values[-1].step, middle, low, high)
