"""Whole or not there at all. The policy here is a file, so that only the writing is tested."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import refuses
from trainer.errors import CheckpointError
from trainer.run_folder import checkpoints, previous_run


class FilePolicy:
    def __init__(self, state: str, fails: bool = False) -> None:
        self.state, self.fails = state, fails

    def save(self, folder):
        (folder / "engine.txt").write_text(self.state)
        if self.fails:
            raise OSError("No space left on device")

    def load(self, folder):
        self.state = (folder / "engine.txt").read_text()


class Number:
    """Something that remembers one number."""

    def __init__(self, number=0):
        self.number = number

    def state(self):
        return {"number": self.number}

    def load(self, state):
        self.number = state["number"]


def learned(step=0):
    return checkpoints.Learned(Number(), Number(step), Number(2 * step), Number())


def save(policy, folder, step, keep=2):
    checkpoints.save(policy, folder, step, keep, learned(step))


def resume(policy, folder, keep=2):
    return checkpoints.resume(policy, folder, keep, learned())


def test_the_latest_whole_one_is_loaded_and_old_ones_are_deleted(tmp_path):
    assert resume(FilePolicy("fresh"), tmp_path) == 0
    for step in (5, 999_998, 999_999, 1_000_000):
        save(FilePolicy(f"after {step}"), tmp_path, step, keep=2)
    policy, parts = FilePolicy("fresh"), learned()
    assert checkpoints.resume(policy, tmp_path, 2, parts) == 1_000_000
    assert (policy.state, parts.curriculum.number, parts.kl.number) == ("after 1000000", 1_000_000, 2_000_000)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_1000000", "step_999999"]


def test_a_file_system_without_links_holds_checkpoints(tmp_path, monkeypatch):
    def symlink(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "symlink_to", symlink)
    save(FilePolicy("after 5"), tmp_path, 5)
    assert resume(FilePolicy("fresh"), tmp_path) == 5


def test_a_failure_while_writing_leaves_the_one_before(tmp_path):
    save(FilePolicy("after 5"), tmp_path, 5, keep=2)
    with pytest.raises(CheckpointError, match="the disk is full"):
        save(FilePolicy("half", fails=True), tmp_path, 10, keep=2)
    assert resume(FilePolicy("fresh"), tmp_path) == 5
    save(FilePolicy("after 10"), tmp_path, 10, keep=2)  # and the leftovers do not disturb the next try
    assert checkpoints.latest(tmp_path).name == "step_000010"


def test_a_deleted_one_means_the_one_before_and_never_a_silent_start(tmp_path):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step)
    shutil.rmtree(tmp_path / "checkpoints/step_000010")
    assert resume(FilePolicy("fresh"), tmp_path) == 5
    shutil.rmtree(tmp_path / "checkpoints/step_000005")
    (tmp_path / "result/adapter").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "result"):
        with refuses(folder / "checkpoints", CheckpointError):
            resume(FilePolicy("fresh"), folder)


def test_a_checkpoint_of_another_format_is_refused_and_kept(tmp_path):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step)
    manifest = tmp_path / "checkpoints/step_000010/manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    with refuses(tmp_path / "checkpoints/step_000010", CheckpointError, names="written"):
        resume(FilePolicy("fresh"), tmp_path)
    assert manifest.is_file()


def test_a_disk_that_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step)
    monkeypatch.setattr(Path, "open", _fails)
    with pytest.raises(OSError, match="Input/output error"):
        resume(FilePolicy("fresh"), tmp_path)


def _fails(path, *arguments, **options):
    if path.name == "engine.txt":
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return open(path, *arguments, **options)


def test_weights_of_other_shapes_are_refused_by_name(tmp_path):
    class Smaller(FilePolicy):
        def load(self, folder):
            torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(3, 2).state_dict())

    save(FilePolicy("x"), tmp_path, 5)
    with refuses(tmp_path / "checkpoints/step_000005", CheckpointError, names="have"):
        resume(Smaller("fresh"), tmp_path)


def test_a_deletion_that_was_cut_short_is_finished_at_the_next_start(tmp_path):
    for step in (5, 10, 15):
        save(FilePolicy(f"after {step}"), tmp_path, step, keep=9)
    (tmp_path / "checkpoints/step_000005/engine.txt").unlink()
    assert resume(FilePolicy("fresh"), tmp_path) == 15
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", "step_000010", "step_000015"]


def spoil(path, change):
    path.write_bytes(change(path.read_bytes()))


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGE = {
    "flipped": lambda folder, name: spoil(folder / name, flipped),
    "cut short": lambda folder, name: spoil(folder / name, lambda content: content[:-2]),
    "missing": lambda folder, name: (folder / name).unlink(),
}


@pytest.mark.parametrize("name", ["engine.txt", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_loaded(tmp_path, capsys, damage, name):
    for step in (5, 10):
        save(FilePolicy(f"after {step}"), tmp_path, step)
    DAMAGE[damage](tmp_path / "checkpoints/step_000010", name)
    policy = FilePolicy("fresh")
    assert resume(policy, tmp_path) == 5
    assert policy.state == "after 5"
    said = capsys.readouterr().err
    assert "step_000010 is damaged and not used: " in said
    assert name in said or name == "manifest.json"  # which may now have another sum for another file
    save(FilePolicy("after 6"), tmp_path, 6, keep=1)  # not the damaged one is kept
    assert checkpoints.latest(tmp_path).name == "step_000006"
    DAMAGE[damage](tmp_path / "checkpoints/step_000006", name)
    with refuses(tmp_path / "checkpoints", CheckpointError, names="every"):
        resume(FilePolicy("fresh"), tmp_path)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    save(FilePolicy("after 5"), tmp_path, 5)
    path = tmp_path / "checkpoints/step_000005/manifest.json"
    content = path.read_bytes()
    for place in range(8 * len(content)):
        path.write_bytes(bytes(byte ^ (1 << place % 8) * (place // 8 == index) for index, byte in enumerate(content)))
        assert checkpoints._unusable(path.parent) or json.loads(path.read_bytes()) == json.loads(content)


def test_a_stray_folder_and_a_renamed_one_are_not_taken_for_the_newest(tmp_path, capsys):
    save(FilePolicy("after 5"), tmp_path, 5)
    folder = tmp_path / "checkpoints"
    (folder / "step_junk").mkdir()
    shutil.copytree(folder / "step_000005", folder / "step_000009")
    assert resume(FilePolicy("fresh"), tmp_path) == 5
    assert "step_000009 is damaged and not used: it is the checkpoint of step 5" in capsys.readouterr().err


def test_the_older_ones_stay_if_the_new_one_cannot_be_read_back(tmp_path):
    save(FilePolicy("after 5"), tmp_path, 5, keep=1)
    rename = type(tmp_path).rename

    def lossy(path, target):
        """A disk that loses the end of a file."""
        rename(path, target)
        spoil(target / "engine.txt", lambda content: content[:-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(tmp_path), "rename", lossy)
        with refuses(tmp_path / "checkpoints/step_000010", CheckpointError, names="engine.txt"):
            save(FilePolicy("after 10"), tmp_path, 10, keep=1)
    assert resume(FilePolicy("fresh"), tmp_path) == 5


@pytest.mark.parametrize(("at", "keep"), [(3, 2), (3, 3), (5, 2)])
def test_a_damaged_one_never_counts_for_those_that_are_kept(tmp_path, at, keep):
    """A copy with another number, older or newer than the one that the run goes on from."""
    for step in (2, 4):
        save(FilePolicy(f"after {step}"), tmp_path, step, keep=9)
    folder = tmp_path / "checkpoints"
    shutil.copytree(folder / "step_000004", folder / f"step_{at:06d}")
    checkpoints._whole.clear()  # another process goes on
    assert resume(FilePolicy("fresh"), tmp_path, keep) == 4
    assert {"step_000002", "step_000004"} <= {path.name for path in folder.iterdir()}
    save(FilePolicy("after 6"), tmp_path, 6, keep=keep)
    whole = [path.name for path in previous_run.checkpoints(tmp_path) if not checkpoints._unusable(path)]
    assert whole == ["step_000002", "step_000004", "step_000006"][-keep:]


def test_a_state_of_another_version_is_refused_by_name(tmp_path):
    older = SimpleNamespace(state=lambda: {"count": 3})
    checkpoints.save(FilePolicy("x"), tmp_path, 5, 2, learned()._replace(kl=older))
    with refuses(tmp_path / "checkpoints/step_000005", CheckpointError, names="state.json"):
        resume(FilePolicy("fresh"), tmp_path)
