"""`octet list`: the runs below a folder, the latest last; or the presets and recipes."""

import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainer.commands.compare import WIDTH
from trainer.config.settings import RUNS
from trainer.config.train_options import PRESETS, RECIPES, names_in
from trainer.errors import ConfigError, DataError
from trainer.machine.console import Console, table
from trainer.reports.report import ends_of
from trainer.run_folder.reader import as_written, read_run
from trainer.run_folder.stopped import stopped

HEADS = ("run", "state", "model", "task", "steps", "result")


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet list runs/sweep"
    parser.add_argument("folder", nargs="?", type=Path, default=RUNS, metavar="FOLDER", help=f"default {RUNS}/")
    parser.add_argument("--presets", action="store_true", help="list presets and recipes, and what they are for")


def run(options: Namespace) -> None:
    if options.presets:
        Console(wide=100).print(table(("", "what it is"), _presets(), {"what it is"}))
        return
    folders = runs_in(options.folder, has_links=True)
    if not folders:
        raise ConfigError(options.folder, "there is no run in it", "Name a folder of runs")
    rows = [cells for folder in folders if (cells := row(folder, options.folder))]
    Console(wide=WIDTH).print(table(HEADS, rows, HEADS))


def runs_in(folder: Path, has_links: bool = False) -> list[Path]:
    """Return the run folders below a folder, without the warm-ups inside runs, the most recently started last. With
    `has_links` also those elsewhere to which a link in this folder leads."""
    written, whole = dict[Path, float](), folder.resolve()
    links = (path for path in folder.glob("*/config.yaml") if whole not in path.parent.resolve().parents)
    walked = (Path(place, "config.yaml") for place, _, files in os.walk(folder) if "config.yaml" in files)
    for path in (*walked, *(links if has_links else ())):  # rglob ends where a run deletes a checkpoint meanwhile
        with suppress(OSError):  # a dangling link, or a folder that may not be entered
            written[path] = path.stat().st_mtime
    configs = sorted(written, key=written.__getitem__)
    runs = {path.parent for path in configs}
    return [path.parent for path in configs if path.parent.name != "warmup" or path.parents[1] not in runs]


def _presets() -> Iterator[list[str]]:
    """Yield each preset and recipe with the first sentence of its file."""
    for option, folder in {"--preset": PRESETS, "--recipe": RECIPES}.items():
        for name in names_in(folder):
            comment = " ".join(re.findall("^# (.*)", (folder / f"{name}.yaml").read_text(), re.MULTILINE))
            yield [f"{option} {name}", *re.findall(r"^.{20,}?\.(?= |$)", comment)]


def row(place: Path, folder: Path) -> list[str]:
    """Return the cells of a run, or none if its config.yaml does not belong to a run."""
    name = os.path.basename(os.path.abspath(folder)) if place == folder else str(place.relative_to(folder))
    try:
        run = read_run(place)
    except (DataError, OSError):  # it cannot be read, or nobody has run it
        return [name, "damaged", *[""] * 4] if (place / "machine.json").is_file() else []
    state, steps, result = "damaged", "", ""
    with suppress(DataError, OSError), as_written(place):  # its files are unreadable, or of another version
        steps = f"{run.steps} of {run.total_steps}"
        shares = [share.value for share, _ in run.evaluated]
        ends = ends_of(run) or [run.measure.text(value) for value in (*shares[:1], *shares[-1:])]
        change = [" -> ".join(ends)] if ends and (run.has_ended or len(shares) > 1) else []
        result = ", ".join([run.verdict.kind, *change] if run.has_ended else change)
        state = "ended" if run.has_ended else "stopped" if stopped(run) else "running"
    task = run.settings["task.name"].rpartition("/")[2]
    return [name, state, run.given["model.name"], task, steps, result]
