"""octet eval and octet merge, on an adapter of a real run."""

import json
import subprocess

import pytest

from tests.forks import forked
from tests.run.test_job import FEW, run, train


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    answer = train(folder, *FEW, "run.steps=1", "run.dir=it", "run.merge=false", "eval.problems=0")
    assert answer.returncode == 0, answer.stderr
    return folder / "it/adapter"


def octet(adapter, *arguments: str) -> subprocess.CompletedProcess:
    return run(*forked(), "-m", "trainer.commands.main", *arguments, folder=adapter.parent.parent)


def test_merge_writes_a_model_that_answers_alike(adapter):
    out = adapter.parent / "whole"
    answer = octet(adapter, "merge", "--adapter", str(adapter), "--out", str(out), "--problems", "8", "--json")
    result = json.loads(answer.stdout)
    assert (result["identical"], result["problems"]) == (8, 8)
    assert result["largest_difference"] < 1e-4
    assert (out / "model.safetensors").is_file()
    again = octet(adapter, "merge", "--adapter", str(adapter), "--out", str(out))
    assert again.returncode == 2
    assert "it exists and is not empty" in again.stderr


def test_eval_puts_base_and_adapter_side_by_side(adapter):
    result = json.loads(octet(adapter, "eval", "--adapter", str(adapter), "--problems", "8", "--json").stdout)
    assert [one["name"] for one in result["evaluations"]] == ["base", "adapter"]
    assert sum(result["evaluations"][0]["categories"].values()) == 8


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["eval", "--adapter", "nowhere"], "--adapter nowhere: there is no adapter_config.json"),
        (["eval", "--problems", "0"], "eval.problems=0: there is nothing to evaluate"),
        (["eval", "rollout.tmperature=1"], "Did you mean rollout.temperature?"),
    ],
)
def test_mistakes_are_answered(adapter, arguments, told):
    answer = octet(adapter, *arguments)
    assert answer.returncode == 2
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr


def test_without_a_command_it_lists_them(adapter):
    answer = octet(adapter)
    assert answer.returncode == 2
    assert "octet merge" in answer.stdout
