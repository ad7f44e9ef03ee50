"""`octet report`: a page about a run, or about several, from the files in their folders."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trainer.commands.options import add_runs, writing
from trainer.machine import disk
from trainer.machine.visible import print
from trainer.reports.report import report
from trainer.run_folder.reader import read_runs


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet report runs/demo"
    add_runs(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="by default report.html in the folder of the run")


def run(options: Namespace) -> None:
    text = report(read_runs(options.runs))
    path = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    with writing(path):
        if options.out:
            path.write_text(text, encoding="utf-8")
        else:
            disk.replace(path, text.encode())
    print(path)
