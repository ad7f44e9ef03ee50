"""Charts as SVG: curves over steps, with a band if values have a range, and differences with their intervals.

A chart shows its numbers under the pointer.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite, log10
from statistics import fmean
from typing import Any, NamedTuple

from trainer.machine.safe_text import visible
from trainer.reports.markup import Html, tag
from trainer.stats import Share
from trainer.watch.measure import Measure

COLOURS = ["#3b82c4", "#e07b39", "#3a9d5d", "#c2508b", "#8a6fc9", "#a08420"]  # visible on white and on black
COLOURS += ["#d4483b", "#1f9aa8", "#d08fb0", "#7c9a1f", "#9a6a4a", "#748396"]
INK, GREY = "#222222", "#888888"
WIDTH, HEIGHT = 420.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 48.0, 10.0, 26.0, 24.0  # margins
LEGEND = 14.0  # height
ROW = 18.0  # height of an arm in a chart of differences
SPARE = 0.01  # margin beside the widest interval, in units of accuracy
MOST_POINTS = 200  # of a curve; neighbouring steps are averaged
LETTER = 7.5  # width of a letter of a label, for wide fonts

Point = tuple[float, float]


def svg(marks: Iterable[Html], width: float, height: float, name: str, alone: bool = False) -> Html:
    """Return an SVG element. Its text has the colour of the page, or is dark on white in a file of its own."""
    attributes: dict[str, object] = {"viewBox": f"0 0 {width:g} {height:g}", "role": "img"}
    if alone:
        marks = [tag("rect", width=width, height=height, fill="#fff"), *marks]
        attributes |= {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height}
        attributes |= {"color": INK, "font_family": "sans-serif"}
    return tag("svg", tag("title", name), *marks, **attributes)


def colour_of(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def label(x: float, y: float, text: str, colour: str = "currentColor", anchor: str = "start", size: int = 11) -> Html:
    """Return a text with its base line at `y`."""
    return tag("text", text, fill=colour, x=_short(x), y=_short(y), text_anchor=anchor, font_size=size)


def line(points: Iterable[Point], colour: str = "currentColor", width: float = 1.8, opacity: float = 1.0) -> Html:
    stroke = {"stroke": colour, "stroke_width": width, "stroke_opacity": opacity}
    return tag("polyline", points=_joined(points), fill="none", stroke_linejoin="round", **stroke)


def dot(x: float, y: float, colour: str) -> Html:
    return tag("circle", cx=_short(x), cy=_short(y), r=3, fill=colour)


def hit(x: float, y: float, width: float, height: float, text: str) -> Html:
    """Return an invisible rectangle that shows a text under the pointer."""
    place = {"x": _short(x), "y": _short(y), "width": _short(width), "height": _short(height)}
    return tag("rect", tag("title", text), class_="hit", fill="transparent", **place)


def _joined(points: Iterable[Point]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


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


@dataclass(frozen=True)
class Chart:
    """One or more curves, none of them empty."""

    title: str
    curves: Sequence[Curve]
    percent: bool = False
    legend: bool = True
    across: str = "step"  # unit of the horizontal axis
    width: float = WIDTH
    height: float = HEIGHT

    def marks(self) -> list[Html]:
        named = self.curves if self.legend and len(self.curves) > 1 else []
        frame = Frame(self, TOP + LEGEND * len(named))
        legend = [
            label(LEFT, 31 + LEGEND * row, visible(curve.name), colour_of(curve.colour))
            for row, curve in enumerate(named)
        ]
        title = label(4, 15, visible(self.title), size=13)
        return [title, *legend, *self._axes(frame), *self._drawn(frame), *self._hits(frame)]

    def _write(self, number: float) -> str:
        return f"{number:.0%}" if self.percent else f"{number:.3g}"

    def _axes(self, frame: "Frame") -> Iterator[Html]:
        for value in ticks(frame.low, frame.high):
            level = frame.down(value)
            yield line([(LEFT, level), (self.width - RIGHT, level)], width=1, opacity=0.15)
            yield label(LEFT - 6, level + 4, self._write(value), anchor="end")
        near = (frame.last - frame.first) / 10  # closer labels would overlap that of the first step
        whole = [step for step in ticks(frame.first, frame.last) if step == round(step) and step > frame.first + near]
        for place, step in enumerate([frame.first, *whole]):
            text = f"{step:.0f}" if place else f"{self.across} {step:.0f}"
            yield label(frame.across(step), self.height - BOTTOM + 16, text, anchor="middle")

    def _drawn(self, frame: "Frame") -> Iterator[Html]:
        for curve in self.curves:
            ends = [(frame.across(one.step), frame.down(one.low), frame.down(one.high)) for one in curve.values]
            if curve.dots:
                yield from (line([(x, low), (x, high)], colour_of(curve.colour), opacity=0.5) for x, low, high in ends)
            elif any(low != high for _, low, high in ends):
                outline = [(x, low) for x, low, _ in ends] + [(x, high) for x, _, high in reversed(ends)]
                yield tag("polygon", points=_joined(outline), fill=colour_of(curve.colour), fill_opacity=0.18)
        around = min((len(curve.values) for curve in self.curves if not curve.dots), default=0) // 20
        for curve in self.curves:
            points = [(frame.across(one.step), frame.down(one.middle)) for one in curve.values]
            has_range = any(one.low != one.high for one in curve.values)
            even = points if has_range or curve.dots else smoothed(points, around)
            if even != points:
                yield line(points, colour_of(curve.colour), width=1, opacity=0.35)
            yield line(even, colour_of(curve.colour), *((1, 0.5) if curve.dots else ()))
            if curve.dots or len(points) == 1:
                yield from (dot(*point, colour_of(curve.colour)) for point in points)

    def _hits(self, frame: "Frame") -> Iterator[Html]:
        texts = defaultdict(list)
        for curve in self.curves:
            for one in curve.values:
                around = f" ({self._write(one.low)} to {self._write(one.high)})" if one.low != one.high else ""
                texts[one.step].append(f"{curve.name}: {self._write(one.middle)}{around}")
        width = (self.width - RIGHT - LEFT) / max(1, len(texts) - 1)
        for step, lines in texts.items():
            place = frame.across(step) - width / 2, frame.top, width, self.height - BOTTOM - frame.top
            yield hit(*place, "\n".join([f"{self.across} {step:.0f}", *lines]))


class Frame:
    """Converts values to coordinates of a chart. Zero is always visible, so that a small change looks small."""

    def __init__(self, chart: Chart, top: float) -> None:
        values = [value for curve in chart.curves for value in curve.values]
        self.right, self.bottom = chart.width - RIGHT, chart.height - BOTTOM
        self.first, self.last = min(value.step for value in values), max(value.step for value in values)
        low, high = min(0.0, *(value.low for value in values)), max(0.0, *(value.high for value in values))
        spare = (high - low or 1.0) / 20
        self.low, self.high, self.top = low - spare * (low < 0), high + spare * (high > 0 or low == 0), top

    def across(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first or 1.0) * (self.right - LEFT)

    def down(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round numbers between two numbers."""
    rough = (high - low or 1.0) / 5
    size = 10.0 ** floor(log10(rough))
    width = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    first = -floor(-low / width)
    return [float(f"{place * width:.6g}") for place in range(first, floor(high / width) + 1)]


def smoothed(points: Sequence[Point], most: int) -> list[Point]:
    """Return the moving average of a curve over `most` points before and after each, and over fewer at its ends."""
    means = []
    for place, (x, _) in enumerate(points):
        around = min(most, place, len(points) - 1 - place)
        means.append((x, fmean(y for _, y in points[place - around : place + around + 1])))
    return means


def thinned(values: Sequence[Value]) -> list[Value]:
    """Leave out values that are not finite, and average neighbours if there are more than can be seen."""
    finite = [value for value in values if all(map(isfinite, value))]
    size = -(-len(finite) // MOST_POINTS) or 1
    parts = [list(zip(*finite[start : start + size])) for start in range(0, len(finite), size)]
    return [Value(steps[-1], *map(fmean, others)) for steps, *others in parts]


def differences(
    title: str, judged: Sequence[Mapping[str, Any]], undecided: str, measure: Measure
) -> tuple[list[Html], float, float]:
    """Return a chart of comparisons with their intervals, its width and its height. Decided ones are coloured."""
    left = LETTER * max(len(visible(one["arm"])) for one in judged) + 12
    low, high = min(0.0, *(one["low"] for one in judged)), max(0.0, *(one["high"] for one in judged))
    spare = (high - low) / 50 if measure.is_reward else SPARE
    low, high = low - spare, high + spare
    bottom = TOP + ROW * len(judged)

    def across(value: float) -> float:
        return left + (value - low) / (high - low) * (WIDTH - RIGHT - left)

    marks, scale = [label(4, 15, title, size=13)], 1 if measure.is_reward else 100
    for value in ticks(low, high):
        marks.append(line([(across(value), TOP), (across(value), bottom)], width=1, opacity=0.15 if value else 0.5))
        marks.append(label(across(value), bottom + 16, f"{scale * value:+g}" if value else "0", anchor="middle"))
    for place, one in enumerate(judged):
        y = TOP + ROW * (place + 0.5)
        colour = GREY if one["verdict"] == undecided else COLOURS[0 if one["difference"] > 0 else 1]
        numbers = measure.change(Share(one["difference"], one["low"], one["high"]), "", "")
        marks += [
            label(left - 8, y + 4, visible(one["arm"]), anchor="end"),
            line([(across(one["low"]), y), (across(one["high"]), y)], colour),
            dot(across(one["difference"]), y, colour),
            hit(0, y - ROW / 2, WIDTH, ROW, f"{one['arm']}: {numbers}, {one['verdict']}"),
        ]
    return marks, WIDTH, bottom + BOTTOM
