"""`octet list`: the runs below a folder, the latest last."""

from argparse import ArgumentParser, Namespace
from contextlib import suppress
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trainer.commands.compare import WIDTH
from trainer.config.settings import RUNS
from trainer.errors import ConfigError, DataError
from trainer.machine.console import Console
from trainer.reports.terminal import stopped
from trainer.run_folder.reader import RunFiles, read_run

HEADS = ("run", "state", "model", "task", "steps", "result")


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet list runs/sweep"
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="FOLDER", help=f"default {RUNS}/")


def run(options: Namespace) -> None:
    found = [one for one in options.folder.rglob("config.yaml") if one.parent.name != "warmup"]
    if not found:
        raise ConfigError(options.folder, "there is no run in it", "Name a folder of runs")
    table = Table(*HEADS, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for path in sorted(found, key=lambda path: path.stat().st_mtime):
        with suppress(DataError):  # a configuration that is not of a run
            table.add_row(*_row(read_run(path.parent), options.folder))
    Console(wide=WIDTH).print(table)


def _row(run: RunFiles, folder: Path) -> list[str]:
    state, steps, result = "damaged", "", ""
    with suppress(DataError):  # its files cannot be read, or are of another version
        state = "ended" if run.has_ended else "stopped" if stopped(run) else "running"
        steps = f"{run.steps} of {run.total_steps}"
        shares = [share.value for line in run.metrics if (share := run.held_out(line))]
        change = [" -> ".join(run.measure.text(value) for value in (shares[0], shares[-1]))] if len(shares) > 1 else []
        result = ", ".join([run.verdict.kind, *change] if run.has_ended else change)
    named = run.settings
    task = named["task.name"].rpartition("/")[2]
    return [str(run.folder.relative_to(folder)), state, named["model.name"], task, steps, result]
