"""`octet study` from end to end: it makes what is missing, gives `supervised` as many tokens, and judges."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

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
    asked = [
        {"question": f"Ann has {a} apples and buys {b}. How many apples are there?",
         "answer": f"There are {a}+{b}=<<{a}+{b}={a + b}>>{a + b} apples.\n#### {a + b}"}
        for a, b in pairs
    ]  # fmt: skip
    return "".join(f"{json.dumps(one)}\n" for one in asked)


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
    for split, first in (("train", 21), ("test", 41)):
        (tmp_path / f"{split}.jsonl").write_text(sums(first))
    assert "run.dir=runs/tiny/supervised-0" in octet(tmp_path, "--dry-run")
    assert not (tmp_path / "runs").exists()
    assert "2 runs, 0 have ended" in octet(tmp_path)
    found = json.loads((tmp_path / "runs/tiny/study.json").read_text())
    assert {*found["arms"]} == {"base", "grpo", "supervised"}
    tokens = {arm: found["arms"][arm]["tokens"] for arm in ("grpo", "supervised")}
    assert tokens["supervised"] == pytest.approx(tokens["grpo"], rel=0.4)  # the nearest number of steps
    assert found["arms"]["grpo"]["samples"] == 32
    assert [(one["arm"], one["problems"]) for one in found["gaps"]] == [("base", 16), ("grpo", 16), ("supervised", 16)]
    (tmp_path / "runs/tiny/supervised-0/eval.json").unlink()
    assert "1 runs, 1 have ended" in octet(tmp_path, "--jobs", "2")
