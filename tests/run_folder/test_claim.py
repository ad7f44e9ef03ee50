"""The lock of a run folder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

import trainer
from tests.conftest import ROOT
from trainer.run_folder import claim


@pytest.fixture
def lock(tmp_path):
    with (tmp_path / ".lock").open("w") as file:
        yield file


def refusing(number: int):
    """Answer as a file system without locks does, such as some mounts of Lustre."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return flock


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_where_there_are_no_locks_it_is_free_with_a_warning(lock, monkeypatch, capsys, number):
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    assert claim._is_free(lock)
    assert "its file system has no locks" in capsys.readouterr().err


def test_another_error_is_one(lock, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        claim._is_free(lock)


def test_what_another_one_has_is_not_free(lock):
    with open(lock.name, "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not claim._is_free(lock)


BARE = """
from importlib import metadata
installed = metadata.version
def version(name):
    if name == "octet-grpo":
        raise metadata.PackageNotFoundError(name)
    return installed(name)
metadata.version = version
import trainer
from tests.conftest import ROOT
from trainer.run_folder import claim
print(claim.provenance())
"""


def test_neither_git_nor_the_installed_distribution_is_needed(tmp_path):
    """A container may have only the dependencies, and the checkout on PYTHONPATH."""
    bare = {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", BARE], env=bare, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith(f"octet-grpo {trainer.__version__}, torch ")
    assert answer.stdout.endswith(", no git revision\n")
