"""`octet compare`: a table of the runs of a sweep, from the files in their folders."""

from __future__ import annotations

import json
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer.config.command_line import flat
from trainer.config.settings import fields
from trainer.errors import DataError
from trainer.run_folder.journal import read_records

NOT_COMPARED = {"run.dir", "run.threads", "run.keep", "run.save_every"}  # without effect on what is learned
WIDTH = 500  # columns, so that long names are not cut off where the width of the screen is unknown


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet compare runs/sweep/0*"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: Namespace) -> None:
    compare(options.runs, options.json)


def compare(runs: Sequence[Path], as_json: bool) -> None:
    others = [run for run in runs if not (run / "config.yaml").is_file()]
    runs = [run for run in runs if run not in others]
    if others and runs:
        names = ", ".join(map(str, others))
        print(f"octet: left out, because there is no config.yaml in it: {names}", file=sys.stderr)
    facts = [facts_of(run) for run in runs or others]
    settings = [facts.pop("settings") for facts in facts]
    differing = [key for key in fields() if key not in NOT_COMPARED and len({str(one[key]) for one in settings}) > 1]
    rows = [
        {"run": str(run), "settings": {key: one[key] for key in differing}, **fact}
        for run, one, fact in zip(runs, settings, facts, strict=True)
    ]
    rows.sort(key=lambda row: row["accuracy"] or 0.0, reverse=True)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        Console(highlight=False, width=WIDTH).print(_table(rows, differing))


def facts_of(run: Path) -> dict[str, Any]:
    """Return the settings, the last and the best accuracy, the number of steps and the seconds of training of a run."""
    settings = _settings(run / "config.yaml")
    lines = read_records(run / "metrics.jsonl")
    seen = [line for line in lines if "eval/accuracy" in line and line["step"]]
    last = seen[-1] if seen else {}
    # `time/reward/<name>` is part of `time/rollout`
    phases = {name for line in lines for name in line if re.fullmatch(r"time/(?!evaluation)\w+", name)}
    seconds = sum(line.get(name, 0.0) for line in lines for name in phases)
    return {
        "settings": settings,
        "steps": lines[-1]["step"] if lines else 0,
        "accuracy": last.get("eval/accuracy"),
        "interval": [last["eval/low"], last["eval/high"]] if last else None,
        "best": max((line["eval/accuracy"] for line in seen), default=None),
        "problems": last.get("eval/problems"),
        "training_s": seconds,
    }


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(
            f"{path.parent}: there is no config.yaml in it, so it is not the folder of a run. Leave it out."
        )
    try:
        settings = flat(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise DataError(
            f"{path}: it contains no settings ({' '.join(str(error).split())}). Leave this run out."
        ) from None
    if settings["model.name"] is None:
        raise DataError(f"{path}: it does not belong to a run: it has no model.name. Leave this folder out.")
    return settings


def _table(rows: Sequence[dict[str, Any]], differing: Sequence[str]) -> Table:
    table = Table(title=_title(rows), box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("run", *differing):
        table.add_column(name, no_wrap=True)
    for name in ("accuracy", "best", "steps", "training"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        settings = [str(row["settings"][key]) for key in differing]
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
