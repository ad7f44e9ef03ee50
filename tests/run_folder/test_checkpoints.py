"""Whole or not there at all. The policy here is a file, so that only the writing is tested."""

import json
import shutil

import pytest

from trainer.errors import CheckpointError
from trainer.run_folder import checkpoints


class FilePolicy:
    def __init__(self, state: str, fails: bool = False) -> None:
        self.state, self.fails = state, fails

    def save(self, folder):
        (folder / "engine.txt").write_text(self.state)
        if self.fails:
            raise OSError("No space left on device")

    def load(self, folder):
        self.state = (folder / "engine.txt").read_text()


class Learned:
    """Something that remembers one number."""

    def __init__(self, number=0):
        self.number = number

    def state(self):
        return {"number": self.number}

    def load(self, state):
        self.number = state["number"]


def save(policy, folder, step, keep=2):
    checkpoints.save(policy, folder, step, keep, {"curriculum": Learned(step), "kl": Learned(2 * step)})


def resume(policy, folder):
    return checkpoints.resume(policy, folder, {"curriculum": Learned(), "kl": Learned()})


def test_the_latest_whole_one_is_loaded(tmp_path):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step, keep=2)
    policy, curriculum, kl = FilePolicy("fresh"), Learned(), Learned()
    assert checkpoints.resume(policy, tmp_path, {"curriculum": curriculum, "kl": kl}) == 10
    assert (policy.state, curriculum.number, kl.number) == ("after 10", 10, 20)


def test_a_run_without_one_starts_at_zero(tmp_path):
    assert resume(FilePolicy("fresh"), tmp_path) == 0


def test_a_failure_while_writing_leaves_the_one_before(tmp_path):
    save(FilePolicy("after 5"), tmp_path, 5, keep=2)
    with pytest.raises(OSError, match="No space"):
        save(FilePolicy("half", fails=True), tmp_path, 10, keep=2)
    policy = FilePolicy("fresh")
    assert resume(policy, tmp_path) == 5
    save(FilePolicy("after 10"), tmp_path, 10, keep=2)  # and the leftovers do not disturb the next try
    assert checkpoints.latest(tmp_path).name == "step_000010"


def test_a_deleted_one_means_the_one_before_and_never_a_silent_start(tmp_path):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step)
    shutil.rmtree(tmp_path / "checkpoints/step_000010")
    assert resume(FilePolicy("fresh"), tmp_path) == 5
    shutil.rmtree(tmp_path / "checkpoints/step_000005")
    with pytest.raises(CheckpointError, match="no checkpoint is left in it"):
        resume(FilePolicy("fresh"), tmp_path)


def test_old_ones_are_deleted(tmp_path):
    for step in range(1, 6):
        save(FilePolicy("x"), tmp_path, step, keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_000004", "step_000005"]


def test_another_number_of_ranks_is_refused(tmp_path):
    save(FilePolicy("x"), tmp_path, 5, keep=2)
    state = tmp_path / "checkpoints/step_000005/state.json"
    state.write_text(json.dumps({"step": 5, "ranks": 4}))
    with pytest.raises(CheckpointError, match="written by 4 ranks, this run has 1"):
        resume(FilePolicy("fresh"), tmp_path)


def test_a_broken_state_is_named(tmp_path):
    save(FilePolicy("x"), tmp_path, 5, keep=2)
    (tmp_path / "checkpoints/step_000005/state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        resume(FilePolicy("fresh"), tmp_path)
