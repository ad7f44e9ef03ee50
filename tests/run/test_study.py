"""`octet study` from end to end: it makes what is missing, gives `supervised` as many tokens, and judges."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, said_by, until
from tests.e2e.short_job import octet
from trainer.machine import disk

TEXT = """
settings:
  task: {name: gsm8k, data_dir: .}
  rollout: {problems: 4, group_size: 4}
  warmup.problems: 4
  run.steps: 2
  eval.problems: 16
seeds: 1
arms: {grpo: }
controls: [supervised]
renumbered: true
"""


def sums(first: int) -> str:
    """Problems like those of GSM8K, whose numbers can be exchanged."""
    pairs = [(number, number + 13) for number in range(first, first + 16)]
    asked = "Ann has {} apples and buys {}. How many apples are there?"
    answers = {(a, b): f"There are {a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}" for a, b in pairs}
    rows = [{"question": asked.format(*pair), "answer": answer} for pair, answer in answers.items()]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def study(folder, *arguments: str) -> str:
    return octet(folder, "study", "tiny.yaml", *arguments, check=True).stdout


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A study in the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text("arms: {grpo: }\ncontrols: [supervised, random]\nseeds: 2\n")


def test_a_dry_run_reads_no_data(tiny, capsys):
    missing = ("task.name=records", "task.path=not_there.jsonl")
    status, said, _ = said_by(capsys, "study", "tiny.yaml", "--dry-run", *missing)
    assert (status, "# supervised-0: after grpo-0, for as many steps " in said) == (0, True)


def test_a_dry_run_of_jobs_prints_the_array_and_its_settings_and_writes_nothing(tiny, tmp_path, capsys):
    _, said, _ = said_by(capsys, "study", "tiny.yaml", "--slurm", "--gpus=2", "--dry-run")
    assert [line in said for line in ("#SBATCH --array=1-4\n", "#SBATCH --gpus-per-node=2\n")] == [True, True]
    settings = [line for line in said.splitlines() if line.startswith("#   ")]
    assert [line.rpartition("/")[2].split()[0] for line in settings] == ["grpo-0", "random-0", "grpo-1", "random-1"]
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_a_study_that_is_in_progress_is_not_started_again(tiny, tmp_path, capsys):
    with disk.claimed(Path("runs/tiny/study.json"), ""):
        status, _, said = said_by(capsys, "study", "tiny.yaml")
    assert (status, "runs/tiny/study.json: another command is writing it" in said) == (2, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_study_that_is_ended_ends_its_runs(tmp_path, number):
    settings = "settings: {run: {steps: 200, save_every: 1}, eval.problems: 4}"
    (tmp_path / "tiny.yaml").write_text(f"{settings}\narms: {{grpo: }}")
    command = [sys.executable, "-m", "trainer.commands.main", "study", "tiny.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: started.poll() is not None or [*tmp_path.glob("runs/tiny/grpo-0/checkpoints/*")], 300)
    started.send_signal(number)
    said = started.communicate(timeout=120)[1]
    assert number == signal.SIGKILL or "The same command continues the study" in said
    until(lambda: not any(str(tmp_path) in (one.info["cwd"] or "") for one in psutil.process_iter(["cwd"])), 300)
    assert "octet: stopped. " in (tmp_path / "runs/tiny/grpo-0.log").read_text()


@pytest.mark.slow
def test_a_study_trains_what_is_missing_and_judges(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TEXT)
    for split, first in (("train", 21), ("test", 41)):
        (tmp_path / f"{split}.jsonl").write_text(sums(first))
    assert "run.dir=runs/tiny/grpo-0" in study(tmp_path, "--dry-run")
    assert not (tmp_path / "runs").exists()
    assert "2 runs to make, 0 ready" in study(tmp_path)
    found = json.loads((tmp_path / "runs/tiny/study.json").read_text())
    assert {*found["arms"]} == {"base", "grpo", "supervised"}
    tokens = {arm: found["arms"][arm]["tokens"] for arm in ("grpo", "supervised")}
    assert tokens["supervised"] == pytest.approx(tokens["grpo"], rel=0.4)  # the nearest number of steps
    assert found["arms"]["grpo"]["samples"] == 32
    assert [(one["arm"], one["problems"]) for one in found["gaps"]] == [("base", 16), ("grpo", 16), ("supervised", 16)]
    (tmp_path / "runs/tiny/supervised-0/verdict.json").unlink()
    assert "1 run to make, 1 ready" in study(tmp_path, "--jobs", "2")
