"""`octet plot`: draw the curves of runs as SVG, or one metric as a figure, from the files in their folders."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from trainer.commands.shared_options import add_runs, writing
from trainer.errors import ConfigError, DataError
from trainer.machine import disk
from trainer.machine.safe_text import print
from trainer.reports import curves
from trainer.reports.chart import svg
from trainer.reports.convert_svg import converted
from trainer.run_folder.reader import RunFiles, as_written, read_runs

LARGEST = 40  # inches
INCH = 96  # in units of an SVG


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet plot runs/sweep/0* --metric held_out --pdf --size 3.3x2.2"
    add_runs(parser, "run folders; seeds become a band")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write; by default the folder of the run")
    parser.add_argument("--metric", metavar="NAME", help="draw one figure: held_out, a metric, time/* or memory/*")
    parser.add_argument("--pdf", action="store_true", help="write the figure as PDF, by cairosvg or rsvg-convert")
    parser.add_argument("--size", metavar="WxH", help="size of the figure in inches (default 4.4x2.5)")
    parser.add_argument("--names", metavar="A,B", help="names of its curves")


def run(options: Namespace) -> None:
    runs = read_runs(options.runs)
    for run in runs:
        if not run.steps:
            raise DataError(run.folder, "no step is logged yet, so there is nothing to plot", "Leave this run out")
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else Path("plots"))
    is_one = options.metric or options.pdf or options.size or options.names
    with as_written(*(run.folder for run in runs)):
        files = _figure(runs, options, folder) if is_one else curves.files(runs)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            disk.replace(folder / name, content)
            print(folder / name)


def _figure(runs: Sequence[RunFiles], options: Namespace, folder: Path) -> dict[str, bytes]:
    """Return the content of the figure under the name of its file."""
    metric, names = options.metric or curves.HELD_OUT, options.names.split(",") if options.names else ()
    chart = curves.of_metric(runs, metric, names, *_size(options.size or "4.4x2.5"))
    content = svg(chart.marks(), chart.width, chart.height, chart.title, alone=True).encode()
    name = metric.removesuffix("/*").replace("/", "-")
    if options.pdf and (pdf := converted(content, folder / name, "pdf")):
        return {f"{name}.pdf": pdf}
    return {f"{name}.svg": content}


def _size(text: str) -> tuple[float, float]:
    sides = re.fullmatch(r"(\d+\.?\d*)x(\d+\.?\d*)", text)
    width, height = map(float, sides.groups()) if sides else (0.0, 0.0)
    if not (1 <= width <= LARGEST and 1 <= height <= LARGEST):
        raise ConfigError(f"--size {text}", f"it is not a width and a height of 1 to {LARGEST} inches", "Write 3.3x2.2")
    return width * INCH, height * INCH
