"""Whole or not there at all. The policy here is a file, so that only the writing is tested."""

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import refuses
from trainer.errors import CheckpointError
from trainer.run_folder import checkpoints, layout


class FilePolicy:
    def __init__(self, state: str = "fresh", fails: bool = False) -> None:
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
    return {"origin": Number(), "curriculum": Number(step), "kl": Number(2 * step), "logs": Number()}


def save(folder, *steps, keep=9, fails=False):
    for step in steps:
        checkpoints.save(FilePolicy(f"after {step}", fails), folder, step, keep, learned(step))
    return folder / f"checkpoints/step_{steps[-1]:06d}"


def resume(folder, policy=None, keep=9):
    return checkpoints.resume(policy or FilePolicy(), folder, keep, learned())


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_the_latest_whole_one_is_loaded_and_old_ones_are_deleted(tmp_path):
    assert resume(tmp_path) == 0
    save(tmp_path, 5, 999_998, 999_999, 1_000_000, keep=2)
    policy, parts = FilePolicy(), learned()
    assert checkpoints.resume(policy, tmp_path, 2, parts) == 1_000_000
    assert (policy.state, parts["curriculum"].number, parts["kl"].number) == ("after 1000000", 1_000_000, 2_000_000)
    assert names(tmp_path) == ["latest", "step_1000000", "step_999999"]


def test_a_file_system_without_links_holds_checkpoints(tmp_path, monkeypatch):
    def symlink(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(Path, "symlink_to", symlink)
    save(tmp_path, 5)
    assert resume(tmp_path) == 5


def test_a_failure_while_writing_leaves_the_one_before(tmp_path):
    save(tmp_path, 5)
    told = r"disk is full: the checkpoint of step 10 needs \d+ bytes, .* run\.keep=1; `--resume` .* from step_000005\.$"
    with pytest.raises(CheckpointError, match=told):
        save(tmp_path, 10, fails=True)
    assert names(tmp_path) == ["latest", "step_000005"]  # nothing half-written
    assert resume(tmp_path) == 5
    assert save(tmp_path, 10) == checkpoints.latest(tmp_path)  # the leftovers do not disturb the next try


def test_a_deleted_one_means_the_one_before_and_never_a_silent_start(tmp_path):
    shutil.rmtree(save(tmp_path, 5, 10))
    assert resume(tmp_path) == 5
    shutil.rmtree(tmp_path / "checkpoints/step_000005")
    (tmp_path / "result/adapter").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "result"):
        with refuses(folder / "checkpoints", CheckpointError):
            resume(folder)


def test_a_checkpoint_of_another_format_is_refused_and_kept(tmp_path):
    last = save(tmp_path, 5, 10)
    spoil(last / "manifest.json", lambda content: content.replace(b'"format": 1', b'"format": 2'))
    with refuses(last, CheckpointError, names="written"):
        resume(tmp_path)
    assert (last / "manifest.json").is_file()


def test_a_disk_that_cannot_be_read_now_is_no_damage(tmp_path, monkeypatch):
    def fails(path, *arguments, **options):
        if path.name == "engine.txt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open(path, *arguments, **options)

    save(tmp_path, 5, 10)
    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError, match="Input/output error"):
        resume(tmp_path)


def test_a_deletion_that_was_cut_short_is_finished_at_the_next_start(tmp_path):
    save(tmp_path, 5, 10, 15)
    (tmp_path / "checkpoints/step_000005/engine.txt").unlink()
    assert resume(tmp_path, keep=2) == 15
    assert names(tmp_path) == ["latest", "step_000010", "step_000015"]


def spoil(path, change):
    path.write_bytes(change(path.read_bytes()))


def flipped(content: bytes) -> bytes:
    place = len(content) // 2
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


DAMAGE = {
    "flipped": lambda path: spoil(path, flipped),
    "cut short": lambda path: spoil(path, lambda content: content[:-2]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("name", ["engine.txt", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_loaded(tmp_path, capsys, damage, name):
    DAMAGE[damage](save(tmp_path, 5, 10) / name)
    policy = FilePolicy()
    assert resume(tmp_path, policy) == 5
    assert policy.state == "after 5"
    said = capsys.readouterr().err
    assert "step_000010 is damaged and not used: " in said
    assert name in said or name == "manifest.json"  # which may now have another sum for another file
    last = save(tmp_path, 6, keep=1)  # not the damaged one is kept
    assert checkpoints.latest(tmp_path) == last
    DAMAGE[damage](last / name)
    with refuses(tmp_path / "checkpoints", CheckpointError, names="every"):
        resume(tmp_path)


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path):
    path = save(tmp_path, 5) / "manifest.json"
    content = path.read_bytes()
    for place in range(8 * len(content)):
        path.write_bytes(bytes(byte ^ (1 << place % 8) * (place // 8 == index) for index, byte in enumerate(content)))
        assert checkpoints._unusable(path.parent) or json.loads(path.read_bytes()) == json.loads(content)


def test_a_stray_folder_and_a_renamed_one_are_not_taken_for_the_newest(tmp_path, capsys):
    saved = save(tmp_path, 5)
    saved.with_name("step_junk").mkdir()
    shutil.copytree(saved, saved.with_name("step_000009"))
    assert resume(tmp_path) == 5
    assert "step_000009 is damaged and not used: it is the checkpoint of step 5" in capsys.readouterr().err
    link = saved.with_name("latest")
    shutil.copytree(saved, link.rename(link.with_suffix(".partial")).with_name("latest"))  # left by a crash, and a copy
    saved.with_name("step_000009.partial").mkdir()
    assert save(tmp_path, 9) == link.resolve()
    assert resume(tmp_path) == 9


def test_the_older_ones_stay_if_the_new_one_cannot_be_read_back(tmp_path, monkeypatch):
    save(tmp_path, 5)
    rename = Path.rename

    def lossy(path, target):
        """A disk that loses the end of a file."""
        rename(path, target)
        spoil(target / "engine.txt", lambda content: content[:-1])

    monkeypatch.setattr(Path, "rename", lossy)
    with refuses(tmp_path / "checkpoints/step_000010", CheckpointError, names="engine.txt"):
        save(tmp_path, 10, keep=1)
    assert resume(tmp_path) == 5


@pytest.mark.parametrize(("at", "keep"), [(3, 2), (3, 3), (5, 2)])
def test_a_damaged_one_never_counts_for_those_that_are_kept(tmp_path, at, keep):
    """A copy with another number, older or newer than the one that the run goes on from."""
    last = save(tmp_path, 2, 4)
    shutil.copytree(last, last.with_name(f"step_{at:06d}"))
    checkpoints._whole.clear()  # another process goes on
    assert resume(tmp_path, keep=keep) == 4
    assert {"step_000002", "step_000004"} <= {*names(tmp_path)}
    save(tmp_path, 6, keep=keep)
    whole = [path.name for path in layout.checkpoints(tmp_path) if not checkpoints._unusable(path)]
    assert whole == ["step_000002", "step_000004", "step_000006"][-keep:]


def test_a_state_of_another_version_is_refused_by_name(tmp_path):
    older = learned() | {"kl": SimpleNamespace(state=lambda: {"count": 3})}
    checkpoints.save(FilePolicy(), tmp_path, 5, 2, older)
    with refuses(tmp_path / "checkpoints/step_000005", CheckpointError, names="state.json"):
        resume(tmp_path)
