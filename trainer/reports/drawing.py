"""A drawing of lines, areas, dots and labels, and two ways to write it: SVG and PNG.

PNG is drawn with Pillow, which TensorBoard needs anyway and which has a font of its own. So a plot needs no other
package, and none of the fonts of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.reports.markup import Html, tag

Point = tuple[float, float]
COLOURS = ("#3b82c4", "#e07b39", "#3a9d5d", "#c2508b", "#8a6fc9", "#a08420")  # seen on white and on black
INK = "#222222"
DENSITY = 2  # pixels of a PNG for one of the drawing
SMOOTH = 2  # times as many pixels are drawn in each direction, and averaged


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
    """A place that says something when the pointer is over it. A PNG has none."""

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


def write_png(path: Path, marks: Sequence[Mark], width: float, height: float) -> None:
    from PIL import Image, ImageDraw

    scale = DENSITY * SMOOTH
    image = Image.new("RGB", (round(width * scale), round(height * scale)), "white")
    pen = ImageDraw.Draw(image, "RGBA")
    for mark in marks:
        _paint(pen, mark, scale)
    image.resize((round(width * DENSITY), round(height * DENSITY)), Image.Resampling.BOX).save(path, optimize=True)


def _paint(pen: Any, mark: Mark, scale: int) -> None:
    if isinstance(mark, Label):
        _write(pen, mark, scale)
    elif isinstance(mark, Dot):
        pen.circle((mark.x * scale, mark.y * scale), 3 * scale, fill=mark.colour)
    elif isinstance(mark, Area):
        pen.polygon(_scaled(mark.points, scale), fill=f"{mark.colour}2e")
    elif isinstance(mark, Line):
        colour = f"{mark.colour or INK}{round(255 * mark.opacity):02x}"
        pen.line(_scaled(mark.points, scale), fill=colour, width=round(mark.width * scale), joint="curve")


def _write(pen: Any, label: Label, scale: int) -> None:
    from PIL import ImageFont

    font = ImageFont.load_default(label.size * scale)
    anchor = {"start": "ls", "middle": "ms", "end": "rs"}[label.anchor]
    pen.text((label.x * scale, label.y * scale), label.text, fill=label.colour or INK, font=font, anchor=anchor)


def _scaled(points: Sequence[Point], scale: int) -> list[Point]:
    return [(x * scale, y * scale) for x, y in points]
