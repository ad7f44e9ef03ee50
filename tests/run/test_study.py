"""`octet study` from end to end: it makes what is missing, gives `supervised` as many tokens, and judges."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

TEXT = """
settings: {run.steps: 2, eval.problems: 16, rollout.problems: 4, rollout.group_size: 4, warmup.problems: 4}
seeds: 1
arms: {grpo: }
controls: [random, supervised]
"""


def octet(folder, *arguments: str) -> str:
    command = [sys.executable, "-m", "trainer.commands.main", "study", "tiny.yaml", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_study_trains_what_is_missing_and_judges(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TEXT)
    assert "run.dir=runs/tiny/random-0" in octet(tmp_path, "--dry-run")
    assert not (tmp_path / "runs").exists()
    assert "3 runs, 0 have ended" in octet(tmp_path)
    found = json.loads((tmp_path / "runs/tiny/study.json").read_text())
    assert {*found["arms"]} == {"base", "grpo", "random", "supervised"}
    tokens = {arm: found["arms"][arm]["tokens"] for arm in ("grpo", "supervised")}
    assert tokens["supervised"] == pytest.approx(tokens["grpo"], rel=0.4)  # the nearest number of steps
    assert found["arms"]["grpo"]["samples"] == 32
    (tmp_path / "runs/tiny/random-0/eval.json").unlink()
    assert "1 runs, 2 have ended" in octet(tmp_path, "--jobs", "2")
