"""Runs whose answers have several turns."""

import json

from tests.conftest import ROOT, learned, lines_of
from tests.e2e.short_job import FEW, do_the_last_step_again, train

CALLS = ["--preset", "nano", *FEW, "rollout.max_new_tokens=40", "run.merge=false", "eval.problems=0"]
CALLS += [f"task.name={ROOT}/examples/calculator.py:build", "task.tools=calculator", "task.calls=inline"]


def files_of(folder):
    weights = folder / "checkpoints" / "step_000002" / "adapter" / "adapter_model.safetensors"
    return learned(folder), (folder / "samples.jsonl").read_text(), weights.read_bytes()


def test_a_run_may_learn_from_the_rewards_of_its_environment(tmp_path):
    """The game of the examples, with an evaluation, in which answers are played too."""
    settings = [f"task.name={ROOT}/examples/guessing.py:build", "eval.problems=2", "rollout.max_new_tokens=60"]
    settings += ["reward.weights={correct: 0, environment: 1.0}", "run.steps=1", f"run.dir={tmp_path}/run"]
    said = train(tmp_path, "--preset", "nano", *FEW[:3], *settings, "run.merge=false")
    assert "earns 0.00, an empty answer 0.00; environment not counted" in said
    samples = lines_of(tmp_path / "run/samples.jsonl")
    assert {one["reward"] == one["reward/environment"] for one in samples} == {True}
    assert any(one["reward"] for one in samples)
    answers = lines_of(tmp_path / "run/eval_answers.jsonl")
    assert any("turns" in one for one in answers)


def test_a_run_with_turns_resumes_to_the_same_bits_and_says_who_wrote_what(tmp_path):
    folder = tmp_path / "run"
    train(tmp_path, *CALLS, f"run.dir={folder}")
    whole = files_of(folder)
    do_the_last_step_again(folder)
    assert files_of(folder) == whole
    samples = [json.loads(line) for line in whole[1].splitlines()]
    told = [one for one in samples if "turns" in one]
    assert told, "some answers call the calculator"
    for one in told:
        assert [turn["role"] for turn in one["turns"]][:2] == ["model", "environment"]
        assert one["turns"][-1] == {"role": "model", "text": one["completion"]}
    assert all(record["turns"] >= 1 for record in whole[0])
