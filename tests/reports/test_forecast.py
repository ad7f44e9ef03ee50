"""Forecasts of runs that have ended, from the first half of each, against their ends."""

import json
import re
from math import exp
from pathlib import Path
from statistics import fmean

import pytest

from tests.conftest import write_lines
from trainer.reports.forecast import forecast, outlook
from trainer.run_folder.reader import read_run

RESULTS = Path(__file__).parents[2] / "bench/results"
ROUNDING = 0.005  # of the figures that are printed


def curves():
    """Yield the curve of each run, the number of answers behind a point, and how many points make its end."""
    for run in json.loads((RESULTS / "seeds.json").read_text())["runs"]:
        yield [*enumerate(run["sampled_accuracy"], 1)], 128, 5
    for name in ("teaching", "addition"):
        for run in json.loads((RESULTS / f"{name}.json").read_text())["runs"]:
            yield [(point["step"], point["strict"]) for point in run["curve"]], run["problems"], 1


def test_the_first_half_of_a_run_says_where_it_ends():
    near, inside, as_good = [], [], []
    for points, answers, size in curves():
        step = points[-1][0]
        end = fmean(right for _, right in points[-size:])
        half = [point for point in points if point[0] <= step / 2]
        found, last = forecast(half, answers, step), fmean(right for _, right in half[-size:])
        near.append(abs(found.value - end) <= 0.05)
        inside.append(found.low - ROUNDING <= end <= found.high + ROUNDING)
        as_good.append(abs(last - end) <= 0.05)
    assert len(near) == 21
    assert fmean(near) >= 0.8 > fmean(as_good)
    assert fmean(inside) >= 0.9


def test_the_interval_of_a_gain_contains_that_of_the_true_curve():
    def right(step):
        return 0.9 - 0.6 * exp(-step / 20)

    gain = forecast([(step, right(step)) for step in range(1, 41)], 100, 80, since=40)
    assert gain.low < right(80) - right(40) < gain.high < gain.low + 0.08


@pytest.mark.parametrize("points", [[], [(1, 0.2), (2, 0.3), (3, 0.4)]])
def test_too_few_points_forecast_nothing(points):
    assert forecast(points, 128, 10) is None


def test_a_report_says_what_more_steps_are_worth(copied):
    folder = copied("result")
    run = read_run(folder)
    sentence = outlook(run)
    assert f"after step {2 * run.steps}; {run.steps} more steps" in sentence
    assert re.search(r"worth about [+-][0-9.]+ points \([+-][0-9.]+ to [+-][0-9.]+\)\.$", sentence)
    write_lines(folder / "metrics.jsonl", run.metrics[:3])
    assert outlook(read_run(folder)) == ""
