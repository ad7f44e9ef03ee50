"""`octet repro` trains the first steps of a run again, and names the first difference and its cause."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import NANO, ROOT, lines_of, write_lines
from tests.e2e.short_job import octet, train
from trainer.config.resolve import resolve
from trainer.machine import disk, hardware
from trainer.run import repeat_steps
from trainer.run_folder import create

FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "run.steps=3", "run.save_every=2"]
FEW += ["task.name=records", "task.path=data.jsonl", "eval.problems=0", "run.merge=false", "rollout.dead_groups=keep"]
FEW += ["run.threads=1", "reward.custom=score.py:score"]  # its rewards differ within most groups
SCORE = "def score(completions, **columns):\n    return [float(len(text) % 5) for text in completions]\n"


def repro(folder: Path, *options: str) -> tuple[int, list[str]]:
    answer = octet(folder, "repro", "it", *options)
    assert answer.returncode < 2, answer.stderr
    return answer.returncode, answer.stdout.splitlines()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    asked = "Ann has {} apples and gets 7. How many has she?"
    write_lines(folder / "data.jsonl", [{"question": asked.format(one), "answer": str(one + 7)} for one in range(9)])
    (folder / "score.py").write_text(SCORE)
    train(folder, "--preset", "nano", *FEW, "run.dir=it")
    return folder


@pytest.fixture
def again(recorded, tmp_path) -> Path:
    """A copy in which something may be changed."""
    folder = shutil.copytree(recorded, tmp_path / "again")
    disk.mark_as_made_here(folder / "it")  # a copy may be of somebody else's run, whose code does not run
    return folder


def test_a_run_is_identical(recorded):
    status, said = repro(recorded, "--steps", "2")
    assert status == 0
    assert [line.partition(":")[0] for line in said[:2]] == ["identical to the bit"] * 2
    assert "16 answers" in said[0]
    assert "adapter after step 2" in said[1]


@pytest.mark.parametrize("name", ["default", "calculator", "maze"])
def test_the_first_step_of_a_run_in_the_gallery_is_repeated(name):
    """On another processor sums round differently, so a metric may differ; what is asked and answered may not."""
    repeats_the_first_step(ROOT / "gallery" / name, ROOT)


def repeats_the_first_step(run: Path, folder: Path) -> None:
    answer = octet(folder, "repro", run, "--steps", "1")
    assert answer.returncode < 2, answer.stderr
    first = answer.stdout.splitlines()[0]
    assert (answer.returncode == 1) == first.startswith("differs")
    same = r"identical to the bit: .* 16 answers|equal up to rounding, on another"
    assert re.match(rf"{same}|differs: step 1: \S+ is [\d.e-]+, and was ", first), first


def with_metrics(again: Path, **factors: float) -> Path:
    """Multiply metrics of all steps of a run."""
    records = lines_of(again / "it/metrics.jsonl")
    changed = [{name: value * factors.get(name, 1) for name, value in record.items()} for record in records]
    write_lines(again / "it/metrics.jsonl", changed)
    return again / "it"


def test_rounding_is_no_difference_on_another_processor(recorded, again):
    machine = json.loads((again / "it/machine.json").read_text())
    (again / "it/machine.json").write_text(json.dumps(machine | {"processor": "Z80"}))
    run = with_metrics(again, entropy=1 + 4e-7, sampler_difference=1.2)
    status, said = repro(again, "--steps", "1")
    assert status == 0, said
    assert said[0] == "equal up to rounding, on another processor: the metrics of 1 step"
    assert said[1] == "identical to the bit: the 8 answers in samples.jsonl"
    assert said[2].startswith("the first difference: step 1: ")
    assert [line for line in said[3:] if "Z80" in line]
    for name, factor in (("entropy", 1 + 1e-4), ("lr", 1 + 1e-6), ("reward/mean", 1.001)):
        first = next(repeat_steps._differences(with_metrics(again, **{name: factor}), recorded / "it", 1, rounds=True))
        assert first.startswith(f"step 1: {name} is "), first
        with_metrics(again, **{name: 1 / factor})
    samples = lines_of(run / "samples.jsonl")
    write_lines(run / "samples.jsonl", [one | {"completion": "1"} for one in samples])
    assert "completion of an answer" in next(repeat_steps._differences(run, recorded / "it", 1, rounds=True))


def test_rounding_is_a_difference_on_the_same_processor(again):
    with_metrics(again, entropy=1 + 4e-7)
    status, said = repro(again, "--steps", "1")
    assert (status, said[0].startswith("differs: step 1: entropy is ")) == (1, True)


def test_answers_that_are_missing_are_a_difference(recorded, again):
    write_lines(again / "it/samples.jsonl", lines_of(again / "it/samples.jsonl")[:5])
    found = list(repeat_steps._differences(again / "it", recorded / "it", 2))
    assert found == ["step 1: samples.jsonl has 8 answers, and had 5", "step 2: samples.jsonl has 8 answers, and had 0"]


def test_only_answers_that_both_runs_have_logged_are_compared(recorded, again):
    """Rank 0 logs other groups if the run is repeated on another number of ranks."""
    samples = lines_of(again / "it/samples.jsonl")
    other = [one | {"problem": "other"} if at % 8 > 3 else one for at, one in enumerate(samples)]
    write_lines(again / "it/samples.jsonl", other)
    assert list(repeat_steps._differences(again / "it", recorded / "it", 2)) == []
    write_lines(again / "it/samples.jsonl", [one | {"completion": "1"} for one in other])
    assert len(list(repeat_steps._differences(again / "it", recorded / "it", 2))) == 8


def test_another_number_of_threads_is_the_cause(recorded):
    status, said = repro(recorded, "run.threads=2", "--steps", "2")
    assert status == 1
    assert said[0].startswith("differs: step 1: ")
    assert "likely cause: threads: 2; the run had 1" in said


def test_an_earlier_record_without_the_processor_has_the_same_device(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    create.write_machine(tmp_path, resolve("nano"))
    now = json.loads((tmp_path / "machine.json").read_text())
    assert now["processor"] == hardware.processor()
    assert [*repeat_steps._surroundings({"device": "CPU with AVX2"}, now)] == []


def test_a_file_in_the_run_folder_is_the_same_from_the_scratch_folder():
    """Such as the adapter that a warm-up has left, whose path is relative only in its own run folder."""
    before = {"threads": 1, "checksum of warmup/start/adapter_config.json": 7, "checksum of score.py": 8}
    now = {"threads": 2, "ranks": 1, "checksum of /it/warmup/start/adapter_config.json": 7, "checksum of score.py": 9}
    found = list(repeat_steps._surroundings(before, now))
    assert found == ["threads: 2; the run had 1", "checksum of score.py: 9; the run had 8"]


def edit(name: str, *changes: str):
    """Return what replaces texts in a file, the first by the second and so on."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        for old, new in zip(changes[::2], changes[1::2]):
            text = text.replace(old, new)
        (folder / name).write_text(text)

    return change


OF_THE_SEED = ["the setting run.seed=1; the run has 0"]  # as its checkpoint says
OF_THE_SEED += ["the order of the training problems, which follows from run.seed"]
PEARS = edit("it/given/path/data.jsonl", "Ann has 3 apples", "Eve has 3 pears", "Ann has 4 apples", "Eve has 4 pears")
CAUSES = {
    "a seed": (edit("it/config.yaml", "\n  seed: 0\n", "\n  seed: 1\n"), OF_THE_SEED),
    "rows": (PEARS, ["the data: records/train/"]),
    "no record of the machine": (lambda folder: (folder / "it/machine.json").unlink(), ["machine.json"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSES)
def test_what_has_changed_is_the_cause(again, name):
    change, causes = CAUSES[name]
    change(again)
    edit("it/metrics.jsonl", '"reward/mean": ', '"reward/mean": 1')(again)
    status, said = repro(again, "--steps", "3")
    assert status == 1
    assert [cause for cause in causes if not any("cause: " in line and cause in line for line in said)] == []


@pytest.mark.slow
def test_another_rate_comes_from_a_resume_with_more_steps(again):
    # which the rate of a first update changes in the second
    edit("it/metrics.jsonl", '"entropy": ', '"entropy": 1')(again)
    edit("it/metrics.jsonl", '"lr": ', '"lr": 1')(again)
    assert "likely cause: the rate follows from run.steps, which was" in repro(again, "--steps", "1")[1][1]


@pytest.mark.slow
def test_a_changed_reward_is_the_cause(recorded):
    """It is looked for where it was when the run was made."""
    edit("score.py", "% 5", "% 6")(recorded)
    status, said = repro(recorded, "--steps", "2")
    edit("score.py", "% 6", "% 5")(recorded)
    assert status == 1
    assert any("cause: checksum of " in line and "score.py: " in line for line in said)


@pytest.mark.slow
def test_other_weights_of_the_base_are_the_cause(again):
    """The first run is over a copy of the embedded model, and the weights of the copy change afterwards."""
    shutil.copytree(NANO, again / "base")
    shutil.rmtree(again / "it")
    train(again, "--preset", "nano", *FEW, "model.name=base", "run.dir=it")
    path = again / "base/model.safetensors"
    save_file({name: 1.01 * value for name, value in load_file(path).items()}, path, {"format": "pt"})
    status, said = repro(again, "--steps", "1")
    assert status == 1
    assert [line.partition(": ")[2].partition(":")[0] for line in said[1:]] == ["base weights"]


def test_a_tensor_that_differs_is_named(recorded, again):
    path = again / "it" / repeat_steps.ADAPTER.format(2)
    tensors = load_file(path)
    name = sorted(tensors)[-1]
    save_file(tensors | {name: torch.nextafter(tensors[name], tensors[name] + 1)}, path)
    (difference,) = repeat_steps._differences(recorded / "it", again / "it", 2)
    assert difference.startswith(f"after step 2: {name} differs by up to ")
    del tensors[name]
    save_file(tensors, path)
    (difference,) = repeat_steps._differences(recorded / "it", again / "it", 2)
    assert difference == f"after step 2: {name} is in one of the two adapters only"
