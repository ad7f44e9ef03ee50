"""Runs whose answers have several turns, with an environment or led by an agent."""

import json
import sys

import pytest

from tests.conftest import ROOT, launch, learned, lines_of
from tests.e2e.short_job import FEW, octet, resumes_to_the_bit, train

CALLS = ["--preset", "nano", *FEW, "rollout.max_new_tokens=40", "run.merge=false", "eval.problems=0"]
CALLS += [f"task.name={ROOT}/examples/calculator.py:build", "task.tools=calculator", "task.calls=inline"]
AGENT = ["--preset", "nano", *FEW, "rollout.max_new_tokens=30", "run.merge=false"]
AGENT += [f"task.agent={ROOT}/tests/rollout/agents.py:twice", "rollout.rows=1", "eval.problems=0"]


def test_a_run_may_learn_from_the_rewards_of_its_environment(tmp_path):
    """The game of the examples, with an evaluation, in which answers are played too."""
    settings = [f"task.name={ROOT}/examples/guessing.py:build", "eval.problems=2", "rollout.max_new_tokens=60"]
    settings += ["reward.weights={correct: 0, environment: 1.0, last: 0}", "run.steps=1", f"run.dir={tmp_path}/run"]
    (tmp_path / "mine.py").write_text("def last(completion_ids): return [ids[-1] for ids in completion_ids]")
    settings += [f"reward.custom={tmp_path}/mine.py:last"]
    said = train(tmp_path, "--preset", "nano", *FEW[:3], *settings, "run.merge=false")
    assert "a prompt ends with" in said
    assert " earns " not in said
    samples = lines_of(tmp_path / "run/samples.jsonl")
    assert {one["reward"] == one["reward/environment"] for one in samples} == {True}
    assert any(one["reward"] for one in samples)
    assert any("turns" in one for one in lines_of(tmp_path / "run/eval_answers.jsonl"))
    assert "\n> higher\n" in octet(tmp_path, "chat", "run", check=True, input="\n").stdout
    asked = octet(tmp_path, "chat", "run", "Which number?")
    assert (asked.returncode, "reset() for a question of yours raised ValueError" in asked.stderr) == (2, True)


def test_a_run_with_turns_resumes_to_the_same_bits_and_says_who_wrote_what(tmp_path):
    train(tmp_path, *CALLS, "rollout.weights=int8", "run.dir=it")
    resumes_to_the_bit(tmp_path / "it")
    told = [one for one in lines_of(tmp_path / "it/samples.jsonl") if "turns" in one]
    assert told, "some answers call the calculator"
    for one in told:
        assert [turn["role"] for turn in one["turns"]][:2] == ["model", "environment"]
        assert one["completion"] == "".join(turn["text"] for turn in one["turns"])
    assert all(record["turns"] >= 1 for record in learned(tmp_path / "it"))


def test_a_run_with_a_tool_of_the_user_resumes_with_its_copy(tmp_path):
    tool = (
        "def twice(number: int) -> int:\n    '''Double.\n\n    Args:\n        number: It.\n    '''\n    return number"
    )
    (tmp_path / "mine.py").write_text(tool)
    few = ["--preset", "nano", *FEW, "run.merge=false", "eval.problems=2", "prompt.max_tokens=400"]
    train(tmp_path, *few, f"task.tools=[calculator,{tmp_path}/mine.py:twice]", "run.dir=it")
    assert (tmp_path / "it/given/code/mine.py").read_text() == tool
    assert f"checksum of {tmp_path}/mine.py" in json.loads((tmp_path / "it/machine.json").read_text())
    (tmp_path / "mine.py").unlink()
    resumes_to_the_bit(tmp_path / "it")
    octet(tmp_path, "chat", "it", "--json", "What is 3 + 4?", check=True)
    octet(tmp_path, "eval", "it", "--problems", "2", check=True)


def test_a_run_of_an_agent_resumes_to_the_same_bits(tmp_path):
    assert "the agent writes its own prompts\n'" in train(tmp_path, *AGENT, "run.dir=it")
    resumes_to_the_bit(tmp_path / "it")
    for sample in lines_of(tmp_path / "it/samples.jsonl"):
        assert [turn["role"] for turn in sample["turns"]] == ["environment", "model"] * 2
    (said, _) = json.loads(octet(tmp_path, "chat", "it", "--json", "What is 3 + 4?", check=True).stdout)["answers"]
    assert [turn["role"] for turn in said["turns"]] == ["environment", "model"] * 2


@pytest.mark.slow
def test_the_example_is_an_agent_that_calculates(tmp_path):
    pytest.importorskip("openai")
    settings = [f"task.name={ROOT}/examples/calculator.py:build", f"task.agent={ROOT}/examples/agent.py:run"]
    few = ["rollout.problems=2", "rollout.group_size=4", "run.steps=1", "run.merge=false", "eval.problems=24"]
    launch(sys.executable, "-m", "octet", "train", *settings, *few, f"run.dir={tmp_path}/run", check=True)
    answers = lines_of(tmp_path / "run/eval_answers.jsonl")
    assert sum(len(one["turns"]) > 2 for one in answers) > len(answers) / 2  # an answer of one call has two
    assert any(" = " in one["completion"] and one["strict"] == one["gold"] for one in answers)
