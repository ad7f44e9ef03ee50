"""`octet report`: a page about a run, or about several, from the files in their folders."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from trainer.commands.options import add_runs, converted, writing
from trainer.machine import disk
from trainer.machine.visible import print
from trainer.reports.report import report
from trainer.reports.share import picture
from trainer.run_folder.reader import RunFiles, read_runs


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet report runs/demo"
    add_runs(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--out", type=Path, metavar="FILE", help="by default report.html in the folder of the run")
    either.add_argument(
        "--share", action="store_true", help="one picture instead: share.svg and share.png in the folder"
    )


def run(options: Namespace) -> None:
    runs = read_runs(options.runs)
    if options.share:
        for one in runs:
            _share(one)
        return
    text = report(runs)
    path = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    with writing(path):
        if options.out:
            path.write_text(text, encoding="utf-8")
        else:
            disk.replace(path, text.encode())
    print(path)


def _share(run: RunFiles) -> None:
    drawn = picture(run).encode()
    files = {"share.svg": drawn, "share.png": converted(drawn, "share", "png")}
    with writing(run.folder):
        for name, content in files.items():
            if content:
                disk.replace(run.folder / name, content)
                print(run.folder / name)
