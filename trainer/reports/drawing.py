"""Draw lines, areas, dots and labels as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.reports.markup import Html, tag

Point = tuple[float, float]
COLOURS = ("#3b82c4", "#e07b39", "#3a9d5d", "#c2508b", "#8a6fc9", "#a08420")  # seen on white and on black
INK = "#222222"


class Line(NamedTuple):
    points: Sequence[Point]
    colour: str | None = None  # that of the text
    width: float = 1.8
    opacity: float = 1.0


class Area(NamedTuple):
    points: Sequence[Point]
    colour: str


class Dot(NamedTuple):
    x: float
    y: float
    colour: str


class Label(NamedTuple):
    x: float
    y: float  # of the base line
    text: str
    colour: str | None = None
    anchor: str = "start"  # or middle, or end
    size: int = 11


class Hit(NamedTuple):
    """A place that shows a text when the pointer is over it."""

    x: float
    y: float
    width: float
    height: float
    text: str


Mark = Line | Area | Dot | Label | Hit


def svg(marks: Sequence[Mark], width: float, height: float, name: str, alone: bool = False) -> Html:
    """Return an SVG element. Its text has the colour of the page, or is dark on white if it stands alone."""
    ground = [tag("rect", width=width, height=height, fill="#fff")] if alone else []
    own = {"xmlns": "http://www.w3.org/2000/svg", "width": width, "height": height, "color": INK} if alone else {}
    own |= {"font_family": "sans-serif"} if alone else {}
    box = f"0 0 {width:g} {height:g}"
    return tag("svg", tag("title", name), *ground, *map(_element, marks), viewBox=box, role="img", **own)


def _element(mark: Mark) -> Html:
    if isinstance(mark, Label):
        place = {"x": _short(mark.x), "y": _short(mark.y), "text_anchor": mark.anchor, "font_size": mark.size}
        return tag("text", mark.text, fill=mark.colour or "currentColor", **place)
    if isinstance(mark, Dot):
        return tag("circle", cx=_short(mark.x), cy=_short(mark.y), r=3, fill=mark.colour)
    if isinstance(mark, Hit):
        box = {"x": mark.x, "y": mark.y, "width": mark.width, "height": mark.height}
        place = {key: _short(value) for key, value in box.items()}
        return tag("rect", tag("title", mark.text), class_="hit", fill="transparent", **place)
    points = " ".join(f"{_short(x)},{_short(y)}" for x, y in mark.points)
    if isinstance(mark, Area):
        return tag("polygon", points=points, fill=mark.colour, fill_opacity=0.18)
    stroke = {"stroke": mark.colour or "currentColor", "stroke_width": mark.width, "stroke_opacity": mark.opacity}
    return tag("polyline", points=points, fill="none", stroke_linejoin="round", **stroke)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
