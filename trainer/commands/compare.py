"""`octet compare`: print a table of the runs of a sweep, from the files in their folders. Runs that differ only in
their seed become one row; JSON and CSV have each run."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from trainer.commands.shared_options import add_runs
from trainer.machine.console import Console, folded
from trainer.machine.safe_text import print
from trainer.reports.csv_and_latex import as_csv
from trainer.reports.curves import groups_of
from trainer.reports.report import Pair, ranked, shown
from trainer.run_folder.reader import RunFiles, as_written, differing, facts_of, names_of, read_runs
from trainer.watch.footer import clock
from trainer.watch.measure import REWARD, STRICT

WIDTH = 500  # characters of a line if the output is not a terminal
AGAINST = "against the first"
MEASURED = (STRICT.name, REWARD.name, "best", "steps", "training", AGAINST)


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet compare runs/sweep/0*"
    add_runs(parser)
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print JSON instead of a table")
    instead.add_argument("--csv", action="store_true", help="print CSV instead of a table")


def run(options: Namespace) -> None:
    runs = read_runs(options.runs)
    with as_written(*(run.folder for run in runs)):
        keys = differing([run.given for run in runs])
        tasks = [[_row(run, ranking[0][0], pair, keys) for run, pair in ranking] for ranking in ranked(runs)]
        if options.json:
            print(json.dumps([row for rows in tasks for row in rows], indent=2))
            return
        if options.csv:
            print(as_csv([_flat(row) for rows in tasks for row in rows]))
            return
        console = Console(wide=WIDTH)
        names = {str(folder): name for folder, name in names_of(runs).items()}
        alike = [[str(run.folder) for run in group.runs] for group in groups_of(runs)]
        for rows in tasks:
            for table in tables(_by_seeds(rows, alike), names, console.width):
                console.print(table)
        if len(tasks) > 1:
            console.print("Runs with different tasks or rewards are not compared with each other.")


def _row(run: RunFiles, best: RunFiles, pair: Pair | None, keys: Sequence[str]) -> dict[str, Any]:
    against = {"run": str(best.folder), **pair._asdict(), "said": str(pair)} if pair else None
    settings, evaluates = {key: run.given[key] for key in keys}, run.settings["eval.problems"] != 0
    return {"run": str(run.folder), "settings": settings, "evaluates": evaluates, **facts_of(run), "against": against}


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose values are numbers and texts only."""
    (low, high), against = row["interval"] or ("", ""), row["against"] or {}
    difference, below, above = against.get("difference") or ("", "", "")
    kept = {key: value for key, value in row.items() if key not in ("settings", "evaluates", "interval", "against")}
    pair = {"against": against.get("run"), "difference": difference, "difference_low": below, "difference_high": above}
    return {**kept, "low": low, "high": high, **pair, "p": against.get("p"), **row["settings"]}


def _by_seeds(rows: Sequence[dict[str, Any]], alike: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Return a row for each group of runs that are `alike` but for their seed, the best first. Tests against the best
    of several seeds would say nothing, so they are left out."""
    measure = REWARD.name if REWARD.name in rows[0] else STRICT.name
    by_run = {row["run"]: row for row in rows}
    groups = [group for runs in alike if (group := [by_run[run] for run in runs if run in by_run])]
    if len(groups) < len(rows):
        rows = [_of_seeds(group, measure) if len(group) > 1 else {**group[0], "against": None} for group in groups]
    return sorted(rows, key=lambda row: (row[measure] is None, -(row[measure] or 0.0)))


def _of_seeds(rows: Sequence[dict[str, Any]], measure: str) -> dict[str, Any]:
    """Return the means of several runs, and their lowest and highest result in place of an interval."""
    results, best = ([row[key] for row in rows if row[key] is not None] for key in (measure, "best"))
    seeds = f"{len(results)} of " * (len(results) < len(rows)) + f"{len(rows)} seeds"
    row = rows[0] | {"runs": [row["run"] for row in rows], "settings": {**rows[0]["settings"], "run.seed": seeds}}
    row |= {measure: fmean(results), "interval": [min(results), max(results)]} if results else {measure: None}
    row |= {"best": fmean(best) if best else None, "training_s": fmean(row["training_s"] for row in rows)}
    return row | {"steps": "-".join(map(str, sorted({*(row["steps"] for row in rows)}))), "against": None}


def tables(rows: Sequence[dict[str, Any]], names: Mapping[str, str], width: int) -> Iterator[Table]:
    columns = _columns(rows, names)
    problems = sorted({row["problems"] for row in rows if row["problems"]})
    compared = sum(row["against"] is not None for row in rows)
    corrected = f", p corrected for {compared} runs (Holm)" if compared > 1 else ""
    shared = " (compared on those that both have)" if len(problems) > 1 and compared else ""
    seeds = ", of several seeds their mean, lowest and highest" if any("runs" in row for row in rows) else ""
    title = (
        f"Held-out problems: {', '.join(map(str, problems)) or 'none yet'}{shared}; 95 % intervals{seeds}{corrected}"
    )
    texts = {*columns} - {*MEASURED}
    return folded([*columns], zip(*columns.values(), strict=True), width, texts, title)


def _columns(rows: Sequence[dict[str, Any]], names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the columns by their heads: names, the settings that differ between the rows, and results."""
    settings = [row["settings"] for row in rows]
    differ = [key for key in settings[0] if len({str(values[key]) for values in settings}) > 1]
    differ += ["run.seed"] if len(rows) == 1 and "runs" in rows[0] else []
    columns = {"run": [", ".join(names[run] for run in row.get("runs", [row["run"]])) for row in rows]}
    columns |= {key: [shown(values[key]) for values in settings] for key in differ}
    measure = REWARD if REWARD.name in rows[0] else STRICT
    results = [(row[measure.name], row["interval"], "none yet" if row["evaluates"] else "-") for row in rows]
    columns[measure.name] = [measure.text(value, span) if span else missing for value, span, missing in results]
    columns["best"] = ["-" if row["best"] is None else measure.text(row["best"]) for row in rows]
    columns |= {"steps": [str(row["steps"]) for row in rows], "training": [clock(row["training_s"]) for row in rows]}
    against = [row["against"]["said"] if row["against"] else "" for row in rows]
    return columns | ({AGAINST: against} if any(against) else {})
