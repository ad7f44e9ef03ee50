"""Runs whose answers are led by an agent."""

import sys

import pytest

from tests.conftest import ROOT, launch, learned, lines_of
from tests.e2e.short_job import FEW, do_the_last_step_again, train

AGENT = f"task.agent={ROOT}/tests/rollout/agents.py"
SMALL = ["--preset", "nano", *FEW, "rollout.max_new_tokens=30", "run.merge=false"]


def files_of(folder):
    weights = folder / "checkpoints" / "step_000002" / "adapter" / "adapter_model.safetensors"
    return learned(folder), (folder / "samples.jsonl").read_text(), weights.read_bytes()


def test_a_run_of_an_agent_resumes_to_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    train(tmp_path, *SMALL, f"{AGENT}:twice", "rollout.rows=1", "eval.problems=0", f"run.dir={folder}")
    whole = files_of(folder)
    do_the_last_step_again(folder)
    assert files_of(folder) == whole
    for sample in lines_of(folder / "samples.jsonl"):
        assert [turn["role"] for turn in sample["turns"]] == ["environment", "model"] * 2


@pytest.mark.slow
def test_the_example_is_an_agent_that_calculates(tmp_path):
    pytest.importorskip("openai")
    settings = [f"task.name={ROOT}/examples/calculator.py:build", f"task.agent={ROOT}/examples/agent.py:run"]
    few = ["rollout.problems=2", "rollout.group_size=4", "run.steps=1", "run.merge=false", "eval.problems=24"]
    done = launch(sys.executable, "-m", "octet", "train", *settings, *few, f"run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    answers = lines_of(tmp_path / "run/eval_answers.jsonl")
    assert sum("turns" in one for one in answers) > len(answers) / 2  # an answer of one call has none
    assert any(" = " in one["completion"] and one["strict"] == one["gold"] for one in answers)
