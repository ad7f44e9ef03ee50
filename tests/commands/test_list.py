"""`octet list`, and which run the commands take where none is named."""

import os
import re
from pathlib import Path

import pytest

from tests.commands.test_compare import run_in
from tests.conftest import said_by
from trainer.commands import eval as evaluation
from trainer.commands.main import parser_of
from trainer.commands.shared_options import fill_in_run, pop_folder
from trainer.config.train_options import PRESETS, RECIPES, names_in


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Three runs, one of them in a folder of its own; the last one started is `old`, and has ended."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("old", "sweep/other", "new")):
        run_in(tmp_path / "runs" / name, {4: 0.5})
        os.utime(f"runs/{name}/config.yaml", (0, 1000 - age))
    (tmp_path / "runs/old/verdict.json").write_text("{}")
    return tmp_path / "runs"


def test_runs_are_listed_in_the_order_of_their_start(runs, capsys):
    status, page, _ = said_by(capsys, "list")
    assert status == 0
    rows = [line.split() for line in page.splitlines()[2:]]
    assert [row[0] for row in rows] == ["new", "sweep/other", "old"]
    steps = ["nano", "nano", "4", "of", "40"]
    assert [row[1:7] for row in rows] == [["stopped", *steps], ["stopped", *steps], ["ended", *steps]]
    assert rows[0][7:] == ["90.0%", "->", "50.0%"]
    assert rows[2][7:] == ["cannot", "tell,", "90.0%", "->", "50.0%"]
    (runs / "new").rename(runs.parent / "moved")  # to a larger disk
    (runs / "new").symlink_to(runs.parent / "moved")
    (runs / "latest").symlink_to("old")  # which is listed already
    assert said_by(capsys, "list")[1] == page
    (runs / "gone").mkdir()
    (runs / "gone/config.yaml").symlink_to("nowhere")
    (runs / "sweep/config.yaml").write_text("model:\n  name: nano\n")  # settings that somebody has written, not a run
    assert [line.split()[0] for line in said_by(capsys, "list", "runs/sweep")[1].splitlines()[2:]] == ["other"]
    assert [line.split()[0] for line in said_by(capsys, "list", "runs/new")[1].splitlines()[2:]] == ["new"]
    for name in ("warmup", "warmup/warmup"):  # a run of this name, and the warm-up inside it
        run_in(runs / name, {4: 0.5})
    assert said_by(capsys, "list")[1].splitlines()[-1].split()[0] == "warmup"
    (runs / "new/machine.json").write_text("{}")  # which somebody's own settings do not have beside them
    for path in (runs / "new/config.yaml", runs / "old/metrics.jsonl"):
        path.unlink()
        path.symlink_to("/proc/self/mem")  # no user can read its beginning
    rows = [line.split()[:2] for line in said_by(capsys, "list")[1].splitlines()[2:]]
    assert sorted(rows[:3]) == [["old", "damaged"], ["sweep/other", "stopped"], ["warmup", "stopped"]]
    assert rows[3:] == [["new", "damaged"]]


def test_a_folder_that_vanishes_while_it_is_listed_is_no_matter(runs, capsys, monkeypatch):
    """A run deletes its older checkpoints."""
    (runs / "old/checkpoints").mkdir()
    page, scan = said_by(capsys, "list")[1], os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scan(f"{path}/gone" if "checkpoints" in str(path) else path))
    assert said_by(capsys, "list") == (0, page, "")


def test_presets_and_recipes_are_listed_with_what_they_are_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    status, page, _ = said_by(capsys, "list", "--presets")
    assert status == 0
    lines = re.sub(r"\n {20,}", " ", page).splitlines()[2:]
    rows = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in lines)
    recipes = [f"--recipe {one}" for one in names_in(RECIPES)]
    assert [*rows] == [*(f"--preset {one}" for one in names_in(PRESETS)), *recipes]
    assert all(re.fullmatch(r".{20,}\.", what) for what in rows.values())
    assert "at most 5 h" in rows["--preset 8gb"]


def options_of(name: str, *words: str):
    options = parser_of(name).parse_intermixed_args(words)
    fill_in_run(options)
    return options


@pytest.mark.parametrize("command", ["chat", "compare", "export --to gguf", "plot", "push --to a/b", "repro", "watch"])
def test_the_latest_run_is_taken_and_named_where_none_is(runs, capsys, command):
    name, *more = command.split()
    (runs / "gone").mkdir()
    (runs / "gone/config.yaml").symlink_to("nowhere")
    options = options_of(name, *more)
    assert [str(one) for one in getattr(options, "runs", None) or [options.run]] == ["runs/old"]
    assert capsys.readouterr().err == "octet: the latest run: runs/old\n"


@pytest.mark.parametrize(("words", "run"), [
    (["rollout.max_new_tokens=5", "run.seed=1"], "runs/old"), (["What is 10 // 3?"], "runs/old"),
    (["How many legs? " * 40], "runs/old"),
    (["run.seed=1", "rollout.rows=4", "runs/new"], "runs/new"), (["run.seed=1", "runs/new", "What is 2?"], "runs/new"),
    (["What is 2 + 3, and what are", "runs", "run.seed=1"], "runs/old"),  # a folder behind a question is a word of it
])  # fmt: skip
def test_a_run_is_found_among_settings_and_a_question(words, run, runs):
    options = options_of("chat", *words)
    assert (str(options.run), options.overrides) == (run, [word for word in words if word != "runs/new"])


def test_what_has_an_equals_sign_is_a_setting_a_run_or_an_option(runs):
    for named in (["run.seed=1", "runs/new"], ["runs/new", "run.seed=1"]):
        assert (str(pop_folder(named)), named) == ("runs/new", ["run.seed=1"])
    assert str(options_of("push", "a=b", "--to", "you/model").run) == "a=b"
    assert options_of("merge", "--out=~/best").out == Path.home() / "best"  # the shell leaves `~` as it is there


def test_octet_eval_in_the_folder_of_a_run_evaluates_what_is_named(runs, monkeypatch):
    monkeypatch.chdir(runs / "old")
    assert evaluation._source(parser_of("eval").parse_intermixed_args([])) is None
    options = parser_of("eval").parse_intermixed_args([".", "eval.problems=4"])
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    assert (str(evaluation._source(options).folder), options.overrides) == ("model", ["eval.problems=4"])
