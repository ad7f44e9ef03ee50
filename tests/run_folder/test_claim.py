"""The lock of a run folder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

import trainer
from tests.conftest import ROOT
from trainer.config.command_line import Request, resolve
from trainer.errors import ConfigError
from trainer.run_folder import claim
from trainer.run_folder.journal import Journal


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


@pytest.fixture
def failed(tmp_path):
    """A folder in which a run has written its settings and the evaluation of the base, and no step."""
    (tmp_path / "config.yaml").write_text(resolve("nano", None, ["reward.custom=wrong.py:score"]).to_yaml())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    yield tmp_path
    if lock := claim._held.pop(tmp_path.resolve(), None):
        lock.close()


def test_a_run_without_a_step_does_not_refuse_the_corrected_command(failed):
    request = Request(resolve("nano", None, [f"run.dir={failed}", "reward.custom=right.py:score"]), "nano", "")
    assert claim.claim(request) == failed
    journal = Journal(failed, 0)
    journal.close()
    assert (failed / "metrics.jsonl").read_text() == ""  # else the new evaluation would be a second step 0


@pytest.mark.parametrize("saved", ["checkpoints/step_000002", "adapter"])
def test_a_run_that_has_saved_something_refuses_other_settings(failed, saved):
    (failed / saved).mkdir(parents=True)
    request = Request(resolve("nano", None, [f"run.dir={failed}"]), "nano", "")
    with pytest.raises(ConfigError, match=r"it holds a run with other settings: reward\.custom"):
        claim.claim(request)


def test_a_run_that_has_lost_its_steps_takes_other_settings_and_says_so(failed, capsys):
    (failed / "checkpoints/step_000002.partial").mkdir(parents=True)
    (failed / "metrics.jsonl").write_text(
        '{"step": 0, "eval/accuracy": 0.5}\n{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 0.5}\n'
    )
    assert claim.claim(Request(resolve("nano", None, [f"run.dir={failed}"]), "nano", "")) == failed
    said = capsys.readouterr().err
    assert said == f"octet: run.dir={failed}: 2 steps were made in it and not saved; it begins anew\n"


def test_a_run_of_a_version_without_a_setting_goes_on(failed):
    (failed / "checkpoints/step_000002").mkdir(parents=True)
    config = resolve("nano", None, ["reward.custom=wrong.py:score", f"run.dir={failed}"])
    text = config.to_yaml()
    assert "  ignore_accents: false\n" in text
    (failed / "config.yaml").write_text(text.replace("  ignore_accents: false\n", ""))
    assert claim.claim(Request(config, "nano", "")) == failed


@pytest.mark.parametrize("content", [b"", b"\xff", b"model:\n name: [", b"[1]", b"model: 3"])
def test_settings_that_cannot_be_read_are_named(failed, content):
    (failed / "checkpoints/step_000002").mkdir(parents=True)
    (failed / "config.yaml").write_bytes(content)
    request = Request(resolve("nano", None, [f"run.dir={failed}"]), "nano", "")
    with pytest.raises(ConfigError, match=r"config\.yaml: the settings of this run cannot be read|other settings"):
        claim.claim(request)


def test_a_run_folder_that_is_a_link_is_the_folder_behind_it(tmp_path):
    """A second run that names the folder itself must not write into it, too."""
    (tmp_path / "behind").mkdir()
    (tmp_path / "link").symlink_to("behind")
    claim._lock(tmp_path / "link")
    assert claim.is_ours(tmp_path / "behind")
    with (tmp_path / "behind/.lock").open("w") as lock:
        assert not claim._is_free(lock)
    claim._held.pop((tmp_path / "behind").resolve()).close()
