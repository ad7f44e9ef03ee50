"""Files of a run have the permissions of the umask, whichever library has written them."""

import errno
import os
import resource
import stat
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import refuses
from trainer.errors import CheckpointError
from trainer.machine import disk
from trainer.reward.judge import Cache


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def permissions(request):
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_weights_and_the_cache_of_a_judge_follow_the_umask(tmp_path, permissions):
    weights = tmp_path / "adapter_model.safetensors"
    save_file({"a": torch.ones(1)}, weights)
    disk.follow_umask(weights)
    Cache(tmp_path / "cache").put("abc", "a reply")
    files = [weights, tmp_path / "cache/ab/abc.json"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [permissions] * 2


@contextmanager
def files_of_a_kilobyte():
    """No file of this process may be larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_is_too_large_for_its_disk_is_named(tmp_path):
    with files_of_a_kilobyte(), pytest.raises(OSError, match="File too large") as refused:
        disk.replace(tmp_path / "file", b"x" * 2000)
    assert disk.failure(refused.value).startswith("File too large. Its file system")


def test_a_disk_over_its_quota_is_named(tmp_path):
    error = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert disk.failure(error) == "the disk is full (Disk quota exceeded). Make room and try again."
    partial = tmp_path / "partial"
    with refuses(tmp_path, CheckpointError, names="quota"), disk.writing(partial, "the result", "Make room."):
        raise error


def test_a_file_of_numpy_that_is_cut_short_means_a_full_disk(tmp_path, monkeypatch):
    """numpy's error has no number, so a file is written to find out."""
    monkeypatch.setattr(disk, "PROBE_BYTES", 2000)
    folder = tmp_path / "result"
    writing = disk.writing(folder, "the result", "Make room.")
    with files_of_a_kilobyte(), refuses(tmp_path, CheckpointError, names="the result"), writing:
        folder.mkdir(exist_ok=True)
        raise OSError("2000 requested and 1000 written")
    assert not folder.exists()


@pytest.mark.parametrize("error", [OSError("no tokenizer"), RuntimeError("of another kind")])
def test_an_error_before_anything_is_written_is_none_of_the_disk(error, tmp_path):
    with pytest.raises(type(error), match=str(error)), disk.writing(tmp_path, "it", "Make room."):
        raise error
    assert tmp_path.exists()


def test_a_folder_that_disappears_while_torch_writes_is_named(tmp_path):
    folder = tmp_path / "checkpoint"
    with refuses(tmp_path, CheckpointError, names="No such file"), disk.writing(folder, "it", "Make room."):
        torch.save({}, folder / "engine/state.pt")


def test_two_commands_do_not_write_one_result(tmp_path):
    out = tmp_path / "out"
    with disk.named_when_checked(out) as unchecked:
        with refuses(out, CheckpointError, names="another command is writing it"), disk.named_when_checked(out):
            pass
        unchecked.mkdir()
        (unchecked / "file").touch()
    with refuses(out, CheckpointError, names="has written it meanwhile"), disk.named_when_checked(out):
        pass
    assert [path.name for path in out.iterdir()] == ["file"]


def test_what_a_crash_has_left_is_in_the_way_of_nothing(tmp_path):
    file, out = tmp_path / "file", tmp_path / "out"
    file.with_name("file.partial").write_text("half")
    disk.replace(file, b"whole")
    assert file.read_bytes() == b"whole"
    for name in ("out.unchecked", "out.refused"):
        (tmp_path / name).mkdir()
    with disk.named_when_checked(out) as unchecked:
        unchecked.mkdir()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "out"]
    assert not disk.is_locked(tmp_path / ".lock"), "there is none"


def test_a_link_is_not_followed_and_a_folder_of_others_is_not_private(tmp_path, monkeypatch):
    folder, link = disk.private_folder(tmp_path / "folder"), tmp_path / "link"
    assert disk.private_folder(folder) == folder
    link.symlink_to(folder)
    with pytest.raises(OSError, match="Too many levels"):
        disk.not_a_link(str(link), os.O_WRONLY)
    assert not disk.is_private(link)
    disk.remove(link)
    assert (link.is_symlink(), folder.is_dir()) == (False, True)
    folder.chmod(0o710)
    with pytest.raises(PermissionError, match="another user"):
        disk.private_folder(folder)
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert not disk.is_private(folder)
