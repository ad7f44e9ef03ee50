"""`octet report`: write a page about one run or several, from the files in their folders."""

import time
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext, suppress
from pathlib import Path

from trainer.commands.shared_options import add_runs, writing
from trainer.errors import ConfigError, DataError
from trainer.machine import disk
from trainer.machine.safe_text import print
from trainer.reports.convert_svg import converted
from trainer.reports.report import report
from trainer.reports.share_picture import picture
from trainer.reports.terminal import are_live
from trainer.run_folder.reader import RunFiles, as_written, read_run, read_runs

SECONDS = 5.0  # between two updates of the page
REST = 50.0  # an update that takes a second is followed by a pause of 50, so watching takes 2 % of a processor at most


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet report runs/demo"
    add_runs(parser)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--out", type=Path, metavar="FILE", help="by default report.html in the run folder")
    parser.add_argument("--watch", action="store_true", help="update the page until the runs end; it reloads itself")
    either.add_argument("--share", action="store_true", help="draw one picture instead: share.svg and share.png in RUN")


def run(options: Namespace) -> None:
    runs = read_runs(options.runs)
    if options.watch and options.share:
        raise ConfigError("--watch", "a picture does not reload itself", "Leave out --share")
    if options.share:
        for run in runs:
            _share(run)
        return
    path = options.out or (options.runs[0] / "report.html" if len(options.runs) == 1 else Path("report.html"))
    is_live, pause = options.watch and are_live(runs), SECONDS
    _write(path, report(runs, reloads=is_live), is_named=options.out is not None)
    print(path, flush=True)
    while is_live:
        time.sleep(pause)
        began = time.perf_counter()
        runs = [read_run(run.folder) for run in runs]
        is_live = are_live(runs)
        # a file that is just being written is complete at the next update
        with suppress(DataError) if is_live else nullcontext():
            _write(path, report(runs, reloads=is_live), is_named=options.out is not None)
        pause = max(SECONDS, REST * (time.perf_counter() - began))


def _write(path: Path, text: str, is_named: bool) -> None:
    with writing(path):
        if is_named and (path.is_symlink() or (path.exists() and not path.is_file())):  # such as /dev/stdout
            path.write_text(text, encoding="utf-8")
        else:
            disk.replace(path, text.encode())


def _share(run: RunFiles) -> None:
    with as_written(run.folder):
        drawn = picture(run).encode()
    files = {"share.svg": drawn, "share.png": converted(drawn, run.folder / "share", "png")}
    for name, content in files.items():
        if content:
            disk.replace(run.folder / name, content)
            print(run.folder / name)
