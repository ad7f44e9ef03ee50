"""The figures of the documentation, from what was measured; bench/report.py writes them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.reports.chart import HEIGHT, WIDTH, Chart, Curve, Value
from trainer.reports.markup import Html
from trainer.reports.study_page import drawings

ROOT = Path(__file__).parent.parent


def figures() -> Iterator[tuple[str, Sequence[Html], float, float, str]]:
    """Yield the name, marks, width, height and title of each figure."""
    for name, chart in charts():
        yield name, chart.marks(), WIDTH, HEIGHT, chart.title
    for study in sorted((ROOT / "bench/results/studies").glob("*.json")):
        for against_first in [*drawings(json.loads(study.read_text()))][-1:]:  # none with too few seeds
            yield f"study_{study.stem}", *against_first


def charts() -> Iterator[tuple[str, Chart]]:
    taught, added, solved = (
        json.loads((ROOT / f"bench/results/{name}.json").read_text())["runs"]
        for name in ("teaching", "addition", "gsm8k")
    )
    yield "teaching", _of_arms("accuracy, mean and range of five seeds", taught)
    yield "addition", _of_arms("accuracy on held-out sums, three seeds", added)
    yield from _against_trl()
    curve = [Value(one["step"], *[one["strict"]] * 3) for one in solved[0]["warmup"]["curve"]]
    yield "warmup_gsm8k", Chart("strict accuracy on GSM8K's 1,319 in the warm-up", [Curve("", curve)], percent=True)


def _against_trl() -> Iterator[tuple[str, Chart]]:
    """Accuracy over samples and over seconds since the launch: the mean and range of the seeds."""
    for path in sorted((ROOT / "bench/results").glob("vs_trl*.json")):
        sides = json.loads(path.read_text())["sides"]
        for name, unit in (("samples", "sample"), ("cpu_s", "second")):
            curves = [
                Curve(side, [*_means(found["curves"], name)], colour)
                for colour, (side, found) in enumerate(sides.items())
                if "curves" in found
            ]
            if curves:
                title = f"accuracy over {unit}s{' of the processor' * (unit == 'second')}"
                yield f"{path.stem}_{unit}s", Chart(title, curves, percent=True, across=unit)


def _means(curves: Sequence[Sequence[Mapping[str, float]]], name: str) -> Iterator[Value]:
    for points in zip(*curves, strict=True):
        right = [one["accuracy"] for one in points]
        yield Value(fmean(one[name] for one in points), fmean(right), min(right), max(right))


def _of_arms(title: str, runs: Sequence[Mapping[str, Any]]) -> Chart:
    names = [*dict.fromkeys(run["arm"] for run in runs)]
    curves = [
        Curve(name, [*_values([run["curve"] for run in runs if run["arm"] == name])], colour)
        for colour, name in enumerate(names)
    ]
    return Chart(title, curves, percent=True)


def _values(curves: Sequence[Sequence[Mapping[str, float]]]) -> Iterator[Value]:
    for at_once in zip(*curves, strict=True):
        found = [one["strict"] for one in at_once]
        yield Value(at_once[0]["step"], fmean(found), min(found), max(found))
