"""`octet plot`: the curves of runs as SVG, from the files in their folders."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trainer.commands.options import add_runs, writing
from trainer.errors import DataError
from trainer.machine import disk
from trainer.machine.visible import print
from trainer.reports import curves
from trainer.run_folder.reader import read_runs


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet plot runs/sweep/0* --out plots"
    add_runs(parser, "run folders; seeds become a band")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to write; by default the folder of the run")


def run(options: Namespace) -> None:
    runs = read_runs(options.runs)
    for one in runs:
        if not one.steps:
            raise DataError(one.folder, "no step is logged yet, so there is nothing to plot", "Leave this run out")
    folder = options.out or (options.runs[0] if len(options.runs) == 1 else Path("plots"))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in curves.files(runs).items():
            disk.replace(folder / name, content)
            print(folder / name)
