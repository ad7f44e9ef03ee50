"""Write the charts of runs on two sheets, as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.machine import disk
from trainer.machine.visible import visible
from trainer.reports.chart import HEIGHT, WIDTH, Chart
from trainer.reports.drawing import COLOURS, Label, Mark, svg
from trainer.reports.panels import Group, groups_of, main_charts, more_charts
from trainer.run_folder.reader import RunFiles

COLUMNS = 2
GAP, LINE = 14.0, 16.0


def write(runs: Sequence[RunFiles], folder: Path) -> Iterator[Path]:
    """Write the two sheets, and yield their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in sheets(runs).items():
        disk.replace(folder / name, content)
        yield folder / name


def sheets(runs: Sequence[RunFiles]) -> dict[str, bytes]:
    """Return the two sheets by the names of their files. Several runs are told apart by a key at the top."""
    groups = groups_of(runs)
    charts = {"curves": main_charts(groups), "details": more_charts(groups)}
    return {f"{name}.svg": svg(*arranged(groups, found), name, alone=True).encode() for name, found in charts.items()}


def arranged(groups: Sequence[Group], charts: Sequence[Chart]) -> tuple[list[Mark], float, float]:
    """Return charts in rows under the names of the runs, and the size of it all."""
    top = GAP + LINE * len(groups)
    marks: list[Mark] = [
        Label(GAP, GAP + LINE * (number + 0.6), visible(group.name), None if len(groups) == 1 else _colour(number))
        for number, group in enumerate(groups)
    ]
    for number, chart in enumerate(charts):
        row, column = divmod(number, COLUMNS)
        marks += chart.marks(GAP + column * (WIDTH + GAP), top + row * (HEIGHT + GAP))
    rows = -(-len(charts) // COLUMNS)
    return marks, GAP + COLUMNS * (WIDTH + GAP), top + rows * (HEIGHT + GAP)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
