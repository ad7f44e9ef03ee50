"""Curves: what is drawn of runs and seeds, and the files that come of it."""

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.commands.conftest import write
from tests.conftest import lines_of, octet, program, said_by, write_lines
from tests.reports.conftest import change, configure
from trainer.config.resolve import resolve
from trainer.reports.chart import COLOURS, MOST_POINTS, Chart, Curve, Value, smoothed, svg, thinned
from trainer.reports.command_of_run import commands
from trainer.reports.curves import charts_of, groups_of
from trainer.run_folder.reader import read_run


@pytest.fixture
def seeds(finished, copied):
    """The run, the same with another seed and a reward that is higher by 1, and one with another learning rate."""
    seed, rate = copied("seed"), copied("rate")
    configure(seed, run__seed=1)
    configure(rate, algorithm__lr=0.01)
    base, *records = lines_of(seed / "metrics.jsonl")
    write_lines(seed / "metrics.jsonl", [base, *(one | {"reward/mean": one["reward/mean"] + 1} for one in records)])
    return [read_run(folder) for folder in (finished, seed, rate)]


def test_the_four_charts_and_their_curves(finished):
    charts = charts_of(groups_of([read_run(finished)]), "curves")
    assert [chart.title for chart in charts] == ["accuracy", "mean reward", "tokens of an answer", "entropy of a token"]
    assert [curve.name for curve in charts[0].curves] == ["training", "held-out, 95 %"]
    assert [value.step for value in charts[0].curves[1].values] == [0, 3, 6]
    assert all(value.low < value.middle < value.high for value in charts[0].curves[1].values)
    assert [value.step for value in charts[1].curves[0].values] == [1, 2, 3, 4, 5, 6]
    extremes, *others = charts_of(groups_of([read_run(finished)]), "details")
    assert [curve.name for curve in extremes.curves] == ["lowest", "highest"]
    titles = [chart.title for chart in others]
    # the KL is not logged
    assert titles == ["loss", "norm of the gradient", "seconds of a step", "memory at its peak, GB"]


def test_runs_that_differ_in_their_seed_are_one_curve_with_a_band(seeds):
    groups = groups_of(seeds)
    assert [group.name for group in groups] == ["demo, seed (2 seeds), algorithm.lr=0.003", "rate, algorithm.lr=0.01"]
    first, other = charts_of(groups, "curves")[1].curves
    reward = seeds[0].metrics[1]["reward/mean"]
    assert first.values[0] == pytest.approx((1, reward + 0.5, reward, reward + 1))
    assert other.values[0].low == other.values[0].high
    write_lines(seeds[1].folder / "metrics.jsonl", seeds[1].metrics[:4])  # it has made three steps so far
    (shorter,) = groups_of([seeds[0], read_run(seeds[1].folder)])
    assert charts_of([shorter], "curves")[1].curves[0].values[-1].step == 3, "a mean over one seed would be a jump"
    change(seeds[1].folder / "machine.json", **{"checksum of given/code/mine.py": "1a2b"})
    assert len(groups_of([seeds[0], read_run(seeds[1].folder)])) == 2, "the reward of another code is another one"
    configure(seeds[2].folder, lora__rslora=True)
    assert groups_of([seeds[0], read_run(seeds[2].folder)])[0].name == "demo, lora.rslora=false algorithm.lr=0.003"


@pytest.mark.parametrize("name", ["again", "demo"])
def test_runs_with_the_same_seed_are_curves_of_their_own(finished, copied, name):
    again = copied(name)
    expected = ["demo", "again"] if name == "again" else [str(finished), str(again)]
    assert [group.name for group in groups_of([read_run(finished), read_run(again)])] == expected


def test_runs_after_other_warm_ups_are_no_seeds_of_each_other(copied):
    """Their config.yaml has what the warm-up has left in place of its settings."""
    runs = []
    for seed, steps in enumerate((3, 5)):
        folder = copied(f"after-{steps}")
        whole = resolve("nano", None, [f"warmup.steps={steps}", f"run.seed={seed}"])
        write(folder / "warmup", {"config.yaml": whole.warmed_up_in(folder / "warmup").to_yaml()})
        write(folder, {"config.yaml": whole.after_warmup(Path("warmup")).to_yaml()})
        runs.append(read_run(folder))
    assert [group.name for group in groups_of(runs)] == ["after-3, warmup.steps=3", "after-5, warmup.steps=5"]
    assert commands(runs[1].given, []) == ["octet train --preset nano run.seed=1 warmup.steps=5"]
    (runs[0].folder / "config.yaml").write_text(resolve("nano").to_yaml())  # trained again, without a warm-up
    assert read_run(runs[0].folder).given["warmup.steps"] == 0


def elements(marks, tag: str) -> list[ElementTree.Element]:
    return [*ElementTree.fromstring(svg(marks, 1, 1, "")).iter(tag)]


def test_a_chart_says_its_numbers_and_shades_its_range():
    chart = Chart("loss", [Curve("loss", [Value(1, 0.5, 0.25, 0.75), Value(2, 0.5, 0.5, 0.5)])])
    titles = [element.text for element in elements(chart.marks(), "title")]
    assert titles[1:] == ["step 1\nloss: 0.5 (0.25 to 0.75)", "step 2\nloss: 0.5"]
    assert len(elements(chart.marks(), "polygon")) == 1


def test_what_is_measured_now_and_then_has_an_interval_and_no_band():
    chart = Chart("", [Curve("", [Value(1, 0.5, 0.25, 0.75), Value(9, 0.5, 0.4, 0.6)], dots=True)])
    upright = [one for one in elements(chart.marks(), "polyline") if one.get("stroke-opacity") == "0.5"]
    assert (elements(chart.marks(), "polygon"), len(upright)) == ([], 3)  # two intervals and the line between


def test_a_noisy_curve_is_drawn_with_its_mean():
    noisy = [(float(x), float(x % 2)) for x in range(100)]
    even = smoothed(noisy, 5)
    assert (even[0], even[-1]) == (noisy[0], noisy[-1])
    assert all(abs(y - 0.5) < 0.1 for _, y in even[5:-5])
    assert smoothed(noisy, 0) == noisy
    curve, short = (Curve("", [Value(x, y, y, y) for x, y in some]) for some in (noisy, noisy[:19]))
    for curves, is_smooth in (([curve], True), ([curve, short], False)):  # one window for all curves of a chart
        marks = elements(Chart("", curves).marks(), "polyline")
        assert any(one.get("stroke-opacity") == "0.35" for one in marks) == is_smooth


@pytest.mark.parametrize("values", [[0.0], [3.0], [-2.0, -2.0], [1e-9, 2e-9], [-1e6, 1e6]])
def test_any_range_of_values_has_an_axis(values):
    chart = Chart("", [Curve("", [Value(step, one, one, one) for step, one in enumerate(values)])])
    assert sum(element.get("text-anchor") == "end" for element in elements(chart.marks(), "text")) >= 3
    assert all(math.isfinite(float(element.get("x"))) for element in elements(chart.marks(), "rect"))


def test_a_long_curve_is_thinned_to_means():
    values = [Value(step, step % 2, 0, 1) for step in range(1000)]
    assert len(thinned(values)) == MOST_POINTS
    assert {value.middle for value in thinned(values)} <= {0.4, 0.6}
    assert thinned([Value(1, math.nan, 0, 0)]) == []


def test_the_command_writes_both_files(seeds, tmp_path, capsys):
    _, out, _ = said_by(capsys, "plot", *(run.folder for run in seeds), "--out", tmp_path / "plots")
    paths = out.split()
    assert [path.rpartition("/")[2] for path in paths] == ["curves.svg", "details.svg"]
    found = [*ElementTree.parse(paths[0]).iter()]
    assert {"mean reward", "rate, algorithm.lr=0.01"} <= {element.text for element in found}
    assert set(COLOURS[:2]) <= {element.get("stroke") for element in found}


def test_a_figure_of_one_metric_has_its_size_and_the_names_that_are_given(seeds, tmp_path, capsys):
    folders = [run.folder for run in seeds]
    figure = ["--size", "3.3x2.2", "--names", "two seeds,fast", "--out", tmp_path / "plots"]
    one, all_phases = ["--metric", "reward/mean"], ["--metric", "time/*"]
    for given, name in (([], "held_out.svg"), (one, "reward-mean.svg"), (all_phases, "time.svg")):
        assert said_by(capsys, "plot", *folders, *figure, *given)[1] == f"{tmp_path / 'plots' / name}\n"
        found = ElementTree.parse(tmp_path / "plots" / name).getroot()
        assert float(found.get("width")) / float(found.get("height")) == pytest.approx(1.5)
        places = [float(one.get("x")) for one in found.iter() if one.get("x")]
        texts = {one.text for one in found.iter()}
        assert ({"two seeds", "fast"} <= texts, max(places) < float(found.get("width"))) == (True, True)
        assert any((text or "").endswith("%") for text in texts) == (not given)


def test_a_figure_is_a_pdf_if_something_can_convert_it(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    status, out, err = said_by(capsys, "plot", finished, "--pdf", "--out", tmp_path / "plots")
    assert (status, out, "pip install cairosvg" in err) == (0, f"{tmp_path}/plots/held_out.svg\n", True)
    program(tmp_path / "rsvg-convert", "#!/bin/sh\nexit 1\n")
    for converter, given in (("cairosvg", b"-f pdf -"), ("rsvg-convert", b"-f pdf")):
        program(tmp_path / converter, '#!/bin/sh\necho "%PDF $@"; /bin/cat\n')  # it says what it was given
        assert said_by(capsys, "plot", finished, "--pdf", "--out", tmp_path / "plots")[0] == 0
        made = (tmp_path / "plots/held_out.pdf").read_bytes()
        assert made == b"%PDF " + given + b"\n" + (tmp_path / "plots/held_out.svg").read_bytes()


def test_a_link_or_a_folder_in_place_of_page_or_picture_leads_nothing_elsewhere(copied, capsys):
    folder = copied("demo")
    (folder / "other").write_text("mine")
    names = ("report.html", "curves.svg", "details.svg", "curves.svg.partial")
    for name in names:
        (folder / name).symlink_to("other")
    for command in ("report", "plot"):
        assert octet(command, folder) == 0
    assert (folder / "other").read_text() == "mine"
    assert not any((folder / name).is_symlink() for name in names)
    for command, name in (("report", "report.html"), ("plot", "curves.svg")):
        (folder / name).unlink()
        (folder / name / "inside").mkdir(parents=True)
        status, _, said = said_by(capsys, command, folder)
        assert (status, "Traceback" in said, f"{name}: " in said) == (2, False, True)
