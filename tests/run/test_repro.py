"""`octet repro` trains the first steps of a run again, and names the first difference and its cause."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import NANO, ROOT
from tests.forks import forked
from trainer.run import replay

FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "run.steps=3", "run.save_every=2"]
FEW += ["task.name=records", "task.path=data.jsonl", "eval.problems=0", "run.merge=false", "rollout.dead_groups=keep"]
FEW += ["reward.custom=score.py:score", "reward.weights={}"]  # its rewards differ within most groups
SCORE = "def score(completions, **columns):\n    return [float(len(text) % 5) for text in completions]\n"


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess:
    environment, command = os.environ | {"PYTHONPATH": str(ROOT)}, [*forked(), *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=580, check=False
    )


def repro(folder: Path, *options: str) -> tuple[int, list[str]]:
    answer = run("-m", "trainer.commands.main", "repro", "it", *options, folder=folder)
    assert answer.returncode < 2, answer.stderr
    return answer.returncode, answer.stdout.splitlines()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    rows = [
        {"question": f"Ann has {one} apples and gets 7. How many has she?", "answer": str(one + 7)} for one in range(9)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(SCORE)
    answer = run(str(ROOT / "train.py"), "--preset", "nano", *FEW, "run.dir=it", folder=folder)
    assert answer.returncode == 0, answer.stderr
    return folder


@pytest.fixture
def again(recorded, tmp_path) -> Path:
    """A copy in which something may be changed."""
    return shutil.copytree(recorded, tmp_path / "again")


def test_a_run_is_identical(recorded):
    status, said = repro(recorded, "--steps", "2")
    assert status == 0
    assert [line.partition(":")[0] for line in said[:2]] == ["identical to the bit"] * 2
    assert "16 answers" in said[0]
    assert "adapter after step 2" in said[1]


def test_answers_that_are_missing_are_a_difference(recorded, again):
    path = again / "it/samples.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    found = list(replay._differences(again / "it", recorded / "it", 2))
    assert found == [
        "step 1: samples.jsonl has 8 answers, and had 5",
        "step 2: samples.jsonl has 8 answers, and had 0",
    ]


def test_another_number_of_threads_is_the_cause(recorded):
    status, said = repro(recorded, "run.threads=2", "--steps", "2")
    assert status == 1
    assert said[0].startswith("differs: step 1: ")
    assert "likely cause: threads: 2; the run had 1" in said


@pytest.mark.slow
def test_another_seed_is_the_cause(again):
    settings = (again / "it/config.yaml").read_text()
    (again / "it/config.yaml").write_text(settings.replace("\n  seed: 0\n", "\n  seed: 1\n"))
    status, said = repro(again, "--steps", "1")
    assert status == 1
    assert said[0].startswith("differs: step 1: the problem of an answer to records/train/")
    assert "likely cause: the setting run.seed=1; the run has 0" in said  # as its checkpoint says
    assert "likely cause: the order of the training problems, which follows from run.seed" in said


@pytest.mark.slow
def test_a_row_of_the_data_that_has_changed_is_the_cause(again):
    text = (again / "data.jsonl").read_text()
    row = 3 if "records/train/3" in (again / "it/samples.jsonl").read_text() else 4  # one of the two is trained on
    (again / "data.jsonl").write_text(text.replace(f"Ann has {row} apples", f"Eve has {row} pears"))
    status, said = repro(again, "--steps", "3")
    assert status == 1
    assert said[1] == f"likely cause: the data: records/train/{row} is not what it was (1 of 8 training problems)"


@pytest.mark.slow
def test_another_reward_function_is_the_cause(again):
    (again / "score.py").write_text(SCORE.replace("% 5", "% 6"))
    status, said = repro(again, "--steps", "1")
    assert status == 1
    assert any(line.startswith("likely cause: checksum of score.py: ") for line in said)


@pytest.mark.slow
def test_other_weights_of_the_base_are_the_cause(again):
    """The first run is over a copy of the embedded model, and the weights of the copy change afterwards."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(NANO, again / "base")
    shutil.rmtree(again / "it")
    run(str(ROOT / "train.py"), "--preset", "nano", *FEW, "model.name=base", "run.dir=it", folder=again)
    path = again / "base/model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(path).items()}, path, {"format": "pt"})
    status, said = repro(again, "--steps", "1")
    assert status == 1
    assert [line.partition(": ")[2].partition(":")[0] for line in said[1:]] == ["base weights"]


@pytest.mark.slow
def test_a_run_without_a_record_of_its_machine_is_said_to_be(again):
    (again / "it/machine.json").unlink()
    text = (again / "it/metrics.jsonl").read_text()
    (again / "it/metrics.jsonl").write_text(text.replace('"reward/mean": ', '"reward/mean": 1'))
    status, said = repro(again, "--steps", "1")
    assert status == 1
    assert "machine.json" in said[1]


def test_a_tensor_that_differs_is_named(recorded, again):
    import torch
    from safetensors.torch import load_file, save_file

    path = again / "it" / replay.ADAPTER.format(2)
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    save_file(tensors | {name: torch.nextafter(tensors[name], tensors[name] + 1)}, path)
    (difference,) = replay._differences(recorded / "it", again / "it", 2)
    assert difference.startswith(f"after step 2: {name} differs by up to ")
    del tensors[name]
    save_file(tensors, path)
    (difference,) = replay._differences(recorded / "it", again / "it", 2)
    assert difference == f"after step 2: {name} is in one of the two adapters only"
