"""`octet speedrun`: it stops at its goal, writes a file without names or paths; the table is what the files give."""

import json
import os
import sys

import pytest

from scripts import make_speedrun_page as page
from tests.conftest import ROOT, launch
from trainer.commands.speedrun import row_of
from trainer.config.resolve import resolve
from trainer.evaluation.best import EvaluationHistory, Milestone

FIRST = json.loads(min(page.FOLDER.glob("*.json")).read_text())


def test_every_result_has_the_schema_and_the_table_is_what_they_give():
    assert page.page() == page.PAGE.read_text()
    for path in page.FOLDER.iterdir():
        assert page.wrong_in(json.loads(path.read_text())) == []
        assert row_of(json.loads(path.read_text())) in page.PAGE.read_text()


@pytest.mark.parametrize(("changes", "what"), [
    ({"host": "me"}, "host"),
    ({"steps": "12"}, "steps"),
    ({"accuracy": 0.89}, "below 0.9"),
    ({"cpu_seconds": 0}, "above zero"),
    ({"settings": ["task.name=mine"]}, "not free"),
    ({"settings": ["algorithm.lr=/home/me"]}, "path"),
    ({"made_with": FIRST["made_with"] | {"base weights": "00"}}, "base weights"),
    ({"made_with": FIRST["made_with"] | {"user": "me"}}, "user"),
    ({"date": "today"}, "date"),
])  # fmt: skip
def test_a_result_that_is_wrong_is_refused(changes, what, monkeypatch, tmp_path):
    assert page.wrong_in(FIRST) == []
    assert what in page.wrong_in(FIRST | changes)[0]
    (tmp_path / "a.json").write_text(json.dumps(FIRST | changes))
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"a\.json: "):
        page.table()


def test_the_fewest_cpu_seconds_come_first(monkeypatch, tmp_path):
    for name, seconds in (("a", 20.0), ("b", 9.0), ("c", 11.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(FIRST | {"cpu_seconds": seconds}))
    monkeypatch.setattr(page, "FOLDER", tmp_path)
    assert [line.split()[1] for line in page.table().splitlines()[2:]] == ["9.0", "11.0", "20.0"]


@pytest.mark.parametrize("name", ["algorithm.lr", "algorithm.kl.coef", "optim.warmup", "lora.r", "run.threads"])
def test_what_a_racer_may_change_includes_sections_within_a_section(name):
    assert page.wrong_in(FIRST | {"settings": [f"{name}=1"]}) == []


def test_a_run_ends_at_the_first_evaluation_that_reaches_the_goal(tmp_path):
    history = EvaluationHistory(tmp_path, resolve("nano").eval, 8, 0, 40)
    history.milestones.append(Milestone(2, 0.95))
    assert not history.has_stopped_rising
    history.goal = 0.96
    assert not history.has_stopped_rising
    history.goal = 0.95
    assert history.has_stopped_rising


@pytest.mark.slow
def test_a_race_leaves_a_file_that_the_table_takes_and_nothing_else(tmp_path):
    settings = ["rollout.dead_groups=refill", "algorithm.kl.coef=1e-3"]
    answer = launch(sys.executable, "-m", "trainer.commands.main", "speedrun", *settings, folder=tmp_path, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["speedrun.json"]
    result = json.loads((tmp_path / "speedrun.json").read_text())
    assert page.wrong_in(result) == []
    assert row_of(result) in answer.stdout
    assert result["answers"] > 128 * result["steps"], "the refills count"
    assert (result["answers"] % 8, result["steps"] % 2) == (0, 0)
    for secret in (os.uname().nodename, str(tmp_path), str(ROOT)):
        assert secret not in (tmp_path / "speedrun.json").read_text()


@pytest.mark.slow
def test_a_run_that_ends_below_the_goal_writes_no_file(tmp_path):
    program = [sys.executable, "-m", "trainer.commands.main", "speedrun", "run.steps=2"]
    answer = launch(*program, folder=tmp_path)
    assert answer.returncode == 1
    assert "after the last step, which is below 90%" in answer.stderr
    assert list(tmp_path.iterdir()) == []
