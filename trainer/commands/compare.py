"""`octet compare`: a table of the runs of a sweep, from the files in their folders."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer.reports.pairs import by_task, paired
from trainer.reports.run_files import RunFiles, differing, facts_of, read_runs

WIDTH = 500  # columns, so that long names are not cut off where the width of the screen is unknown


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet compare runs/sweep/0*"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: Namespace) -> None:
    compare(options.runs, options.json)


def compare(runs: Sequence[Path], as_json: bool) -> None:
    read = read_runs(runs)
    keys = differing([run.settings for run in read])
    tasks = [[_row(run, these[0], keys) for run in these] for these in by_task(read)]
    if as_json:
        print(json.dumps([row for rows in tasks for row in rows], indent=2))
        return
    console = Console(highlight=False, width=WIDTH)
    for rows in tasks:
        console.print(_table(rows, keys))
    if len(tasks) > 1:
        console.print("Runs on different tasks are not compared with each other.")


def _row(run: RunFiles, best: RunFiles, keys: Sequence[str]) -> dict[str, Any]:
    pair = paired(best, run) if run is not best else None
    against = {"run": str(best.folder), **pair._asdict(), "said": str(pair)} if pair else None
    settings = {key: run.settings[key] for key in keys}
    return {"run": str(run.folder), "settings": settings, **facts_of(run), "against": against}


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Table:
    table = Table(title=_title(rows), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("run", *keys):
        table.add_column(name, no_wrap=True)
    is_paired = any(row["against"] for row in rows)
    for name in ("accuracy", "best", "steps", "training", *(["against the first"] if is_paired else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        settings = [str(row["settings"][key]) for key in keys]
        said = [row["against"]["said"] if row["against"] else ""] if is_paired else []
        cells = [_accuracy(row), _percent(row["best"]), str(row["steps"]), _time(row)]
        table.add_row(row["run"], *settings, *cells, *said)
    return table


def _title(rows: Sequence[dict[str, Any]]) -> str:
    problems = sorted({row["problems"] for row in rows if row["problems"]})
    return f"Held-out problems: {', '.join(map(str, problems)) or 'none yet'}; 95 % intervals"


def _accuracy(row: dict[str, Any]) -> str:
    low, high = row["interval"] or (0.0, 0.0)
    return f"{row['accuracy']:.1%} ({100 * low:.1f}-{100 * high:.1f})" if row["interval"] else "none yet"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _time(row: dict[str, Any]) -> str:
    minutes, seconds = divmod(round(row["training_s"]), 60)
    return f"{minutes}:{seconds:02d}"
