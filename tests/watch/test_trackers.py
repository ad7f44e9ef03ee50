"""Names in trackers, a tracker that fails, and real ones without a network."""

import importlib.util
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, launch, lines_of
from tests.forks import forked
from trainer.watch.trackers import TRL, Tracker, group_of

FEW = ["--preset", "nano", "rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "eval.problems=0"]
FEW += ["run.track_answers=true", "run.steps=2", "run.save_every=1", "run.merge=false", "run.dir=it"]
FAILS = """
def init(**settings):
    print("a greeting")
def log(metrics, step):
    if step == 2:
        raise ConnectionError("the server\\nis gone")
    print("sent", step)
def finish():
    raise AssertionError("a tracker that has failed is left alone")
"""


def test_names_are_those_of_trl_and_of_the_trainer_of_transformers():
    places = ("trl/trainer/grpo_trainer.py", "transformers/trainer.py")
    packages = Path(importlib.util.find_spec("trl").origin).parent.parent
    source = "".join((packages / place).read_text() for place in places)
    assert [name for name in TRL.values() if f'"{name}"' not in source] == []
    assert 'f"rewards/{reward_func_name}/mean"' in source


def test_a_tracker_that_fails_costs_one_warning(tmp_path, monkeypatch, capsys):
    (tmp_path / "trackio.py").write_text(FAILS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    warned: list[str] = []
    tracker = Tracker("trackio", tmp_path, {}, warned.append)
    for step in (1, 2, 3):
        tracker.log(step, {"loss": 0.0})
    tracker.close()
    sys.modules.pop("trackio")
    (warning,) = warned
    assert "run.track=trackio failed (ConnectionError: the server is gone)" in warning
    assert capsys.readouterr() == ("", "a greeting\nsent 1\n")


def test_a_library_that_is_not_installed_costs_one_warning(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    warned: list[str] = []
    Tracker("wandb", tmp_path, {}, warned.append).log(1, {"loss": 0.0})
    (warning,) = warned
    assert "pip install wandb" in warning


def train(folder: Path, library: str, *more: str, **environment: str) -> subprocess.CompletedProcess:
    """Run two steps that are tracked, or go on as `more` says. Skip if the library is not installed."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    few = [] if "--resume" in more else [*FEW, f"run.track={library}"]
    return launch(*forked(), ROOT / "train.py", *few, *more, folder=folder, check=True, timeout=580, **environment)


def test_the_seeds_of_an_arm_and_the_runs_of_a_sweep_are_a_group(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rates").mkdir()
    (tmp_path / "rates/job.sbatch").write_text("")
    names = {"runs/mine/grpo-1": "mine/grpo", "rates/001": "rates", "runs/demo": None, "runs/demo-1": None}
    names["elsewhere/mine/grpo-1"] = "mine/grpo"  # a run does not depend on the working folder
    assert {name: group_of(Path(name), {"run.seed": 1}) for name in names} == names


@pytest.mark.slow
def test_wandb_offline_and_resumed(tmp_path):
    first = train(tmp_path, "wandb", "run.dir=runs/mine/it-0", WANDB_MODE="offline")
    again = train(tmp_path, "wandb", "--resume", "runs/mine/it-0", "run.steps=4", WANDB_MODE="offline")
    assert "run.track=wandb failed" not in first.stdout + again.stdout
    identity = (tmp_path / "runs/mine/it-0/tracked_run").read_text()
    parts = sorted((tmp_path / "runs/mine/it-0/wandb").glob("offline-run-*"))
    written = [(part / f"run-{identity}.wandb").read_bytes() for part in parts]
    assert len(written) == 2  # `wandb sync` makes one run of them
    assert all(b"train/rewards/correct/mean" in part and re.search(b"mine/it(?!-)", part) for part in written)
    tables = [json.loads(file.read_text()) for part in parts for file in part.glob("files/media/table/answers_*.json")]
    assert {tuple(one["columns"]) for one in tables} == {("question", "answer", "reward", "reward/correct")}
    assert [len(one["data"]) for one in tables] == [8] * 4  # run.save_every=1


@pytest.mark.slow
def test_wandb_that_cannot_log_in(tmp_path):
    """There is no key here, and no network."""
    unknown = {"WANDB_API_KEY": "", "WANDB_MODE": "online", "NETRC": str(tmp_path / "none"), "HOME": str(tmp_path)}
    done = train(tmp_path, "wandb", **unknown)
    assert done.stdout.count("run.track=wandb failed (") == 1
    assert len((tmp_path / "it/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_trackio_in_a_local_folder_and_resumed(tmp_path):
    data = {"TRACKIO_DIR": str(tmp_path / "data"), "TRACKIO_PROJECT": "tests"}
    train(tmp_path, "trackio", "run.dir=runs/mine/it-0", **data)
    done = train(tmp_path, "trackio", "--resume", "runs/mine/it-0", "run.steps=4", "--json", **data)
    assert json.loads(done.stdout)["run_folder"] == "runs/mine/it-0"
    with sqlite3.connect(tmp_path / "data/tests.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        assert json.loads(database.execute("select config from configs").fetchone()[0])["_Group"] == "mine/it"
    assert sorted({step for _, step, _ in rows}) == [1, 2, 3, 4]  # a checkpoint adds its seconds in a row of its own
    assert {name for name, _, _ in rows} == {f"it-0-{(tmp_path / 'runs/mine/it-0/tracked_run').read_text()}"}
    assert sum("train/reward" in json.loads(metrics) for _, _, metrics in rows) == 4
    tables = [table["_value"] for *_, metrics in rows if (table := json.loads(metrics).get("answers"))]
    sampled = lines_of(tmp_path / "runs/mine/it-0/samples.jsonl")
    assert [[row["reward"] for row in table] for table in tables] == [
        [one["reward"] for one in sampled if one["step"] == step] for step in (1, 2, 3, 4)
    ]
    assert tables[0][0]["answer"].split() == sampled[0]["completion"].split()
