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

from trainer.reports.run_files import differing, facts_of, read_runs

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
    rows = [
        {"run": str(run.folder), "settings": {key: run.settings[key] for key in keys}, **facts_of(run)} for run in read
    ]
    rows.sort(key=lambda row: row["accuracy"] or 0.0, reverse=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        Console(highlight=False, width=WIDTH).print(_table(rows, keys))


def _table(rows: Sequence[dict[str, Any]], keys: Sequence[str]) -> Table:
    table = Table(title=_title(rows), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("run", *keys):
        table.add_column(name, no_wrap=True)
    for name in ("accuracy", "best", "steps", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        settings = [str(row["settings"][key]) for key in keys]
        table.add_row(row["run"], *settings, _accuracy(row), _percent(row["best"]), str(row["steps"]), _time(row))
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
