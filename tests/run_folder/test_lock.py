"""The lock of a run folder, and the facts of its machine."""

import errno
import fcntl
import os
import shutil
import subprocess
import tempfile
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.commands.conftest import write
from tests.conftest import refuses, write_lines
from trainer.commands.study import Runner
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.config.settings import fields
from trainer.config.study import read_study
from trainer.errors import CheckpointError, ConfigError
from trainer.machine import disk, manifest
from trainer.ranks import distributed
from trainer.rollout.vllm import process
from trainer.run import job
from trainer.run_folder import changed_settings, checkpoints, create, layout, lock
from trainer.run_folder.journal import Journal
from trainer.run_folder.reader import read_run
from trainer.watch.phases import total_memory


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EIO])
def test_where_there_are_no_locks_it_is_free_with_a_warning(tmp_path, monkeypatch, capsys, number):
    """As some mounts of Lustre answer; another error is one."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    is_error = number == errno.EIO
    with (
        (tmp_path / ".lock").open("w") as file,
        pytest.raises(OSError, match="Input/output") if is_error else nullcontext(),
    ):
        assert lock._is_free(file)
    assert ("its file system has no locks" in capsys.readouterr().err) != is_error


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path, alone):
    """As `octet ui` and `octet watch` take every few seconds, for a moment."""
    with (tmp_path / ".lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        threading.Timer(0.2, looking.close).start()
        lock._lock(tmp_path)
    assert lock.is_ours(tmp_path)


def test_a_start_beside_a_run_that_replaces_files_finds_none_that_has_gone(tmp_path):
    stop = threading.Event()

    def write_and_delete() -> None:
        while not stop.is_set():
            disk.replace(tmp_path / "verdict.json", b"{}")
            write(tmp_path, dict.fromkeys(["best/1", "best/2", "best/3"], ""))
            (tmp_path / "verdict.json").unlink()
            shutil.rmtree(tmp_path / "best")

    run = threading.Thread(target=write_and_delete)
    run.start()
    try:
        for _ in range(1000):
            layout.refuse_what_is_not_its_own(tmp_path)
            assert disk.size(tmp_path) in (0, 2, 4)
    finally:
        stop.set()
        run.join()


def test_a_process_that_a_reward_has_forked_does_not_keep_the_folder(tmp_path, alone):
    lock._lock(tmp_path)
    with subprocess.Popen(["sleep", "60"], pass_fds=[lock._held[tmp_path].fileno()]) as child:
        distributed.disconnect()
        try:
            with (tmp_path / ".lock").open() as other:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            child.kill()


def test_a_run_ends_if_its_folder_was_deleted_and_made_again_by_another(tmp_path, alone):
    folder = tmp_path / "run"
    lock._lock(folder)
    lock.must_still_be_ours(folder)
    (folder / ".lock").unlink()
    lock.must_still_be_ours(folder)
    (folder / ".lock").touch()
    with refuses("run.dir", names="deleted"):
        lock.must_still_be_ours(folder)


@pytest.fixture
def failed(tmp_path):
    """A folder in which a run has written its settings and the evaluation of the base, and no step."""
    (tmp_path / "config.yaml").write_text(resolve("nano", None, ["reward.custom=wrong.py:score"]).to_yaml())
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/accuracy": 0.5}\n')
    yield tmp_path
    if held := lock._held.pop(tmp_path.resolve(), None):
        held.close()


def test_a_run_without_a_step_does_not_refuse_the_corrected_command(failed):
    assert lock.claim(asked(failed, "reward.custom=right.py:score")) == failed
    Journal(failed, 0).close()
    assert (failed / "metrics.jsonl").read_text() == ""  # else the new evaluation would be a second step 0


def test_a_warm_up_writes_nothing_into_the_folder_of_another_run(failed):
    before = (failed / "config.yaml").read_text()
    with (failed / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with refuses("run.dir", names=failed):
            job._warm_up_first(asked(failed, "warmup.steps=2"), data=None)
    assert (failed / "config.yaml").read_text() == before


def asked(folder, *overrides: str) -> Request:
    return Request(resolve("nano", None, [f"run.dir={folder}", *overrides]), "nano", "")


RESUMED = ["", "run.save_every=3", "run.steps=9", "eval.every=7", "reward.judge.max_requests=3"]
RESUMED += ["rollout.vllm.timeout_s=3.0", "rollout.turns.seconds=9.0", "optim.tokens_per_micro_batch=512"]


@pytest.mark.parametrize("change", RESUMED)
def test_a_run_that_goes_on_says_what_has_changed(failed, capsys, change):
    (failed / "config.yaml").write_text(resolve("nano").to_yaml())
    (failed / "checkpoints/step_000002").mkdir(parents=True)
    request = asked(failed, *filter(None, [change]))
    create.say_how_it_continues(request, lock.claim(request))
    said = capsys.readouterr()
    assert said.err == ""
    assert f"\n  {change} (it has " in said.out if change else said.out == ""
    assert (failed / ".lock").stat().st_mode & 0o111 == 0, "the lock is no program"


LATER = [("run.steps=9", True, True), ("run.steps=9", False, False), ("run.keep=7", True, False)]


@pytest.mark.parametrize(("change", "ended", "resumes"), LATER)
def test_a_run_that_has_ended_goes_on_if_that_is_asked_for(failed, change, ended, resumes):
    """So does one that was stopped, and one that ends as before. Others are refused in tests/data/refusals.yaml."""
    (failed / "config.yaml").write_text(resolve("nano").to_yaml())
    (failed / "adapter").mkdir()
    if ended:
        (failed / "verdict.json").write_text("{}")
    request = replace(asked(failed, change), resumes=failed if resumes else None)
    assert lock.claim(request) == failed


def test_what_may_change_between_two_starts_are_settings():
    """What may not is refused in tests/data/refusals.yaml."""
    assert {*changed_settings.FROM_HERE_ON, *changed_settings.NO_EFFECT} <= {*fields()}


def test_a_run_that_has_lost_its_steps_takes_other_settings_and_says_so(failed, capsys):
    (failed / "checkpoints/step_000002.partial").mkdir(parents=True)
    write_lines(failed / "metrics.jsonl", [{"step": 0, "eval/accuracy": 0.5}, {"step": 1}, {"step": 2}])
    create.say_how_it_continues(asked(failed), lock.claim(asked(failed)))
    assert "2 steps" in capsys.readouterr().err


def test_a_run_folder_that_is_a_link_is_the_folder_behind_it(tmp_path):
    """A second run that names the folder itself must not write into it, too."""
    (tmp_path / "behind").mkdir()
    (tmp_path / "link").symlink_to("behind")
    lock._lock(tmp_path / "link")
    assert lock.is_ours(tmp_path / "behind")
    with (tmp_path / "behind/.lock").open("w") as lock_file:
        assert not lock._is_free(lock_file)
    lock._held.pop((tmp_path / "behind").resolve()).close()


@pytest.fixture
def saved(failed):
    """A run with a checkpoint, whose state has the settings and a checksum."""
    config = resolve("nano", None, [f"run.dir={failed}", "algorithm.lr=0.003"])
    write(failed, {"config.yaml": config.to_yaml()})
    state = {"origin": {"settings": config.model_dump(mode="json")}}
    checkpoint = write(failed / "checkpoints/step_000002", {"state.json": state})
    manifest.write(checkpoint, {"state.json": manifest.checksum(checkpoint / "state.json")})
    return failed


def test_the_settings_of_the_checkpoint_count(saved):
    path = saved / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.003", "lr: 0.001"))
    with refuses("run.dir", names="algorithm.lr: 0.003"):
        lock.claim(asked(saved, "algorithm.lr=0.001"))
    lock.claim(asked(saved, "algorithm.lr=0.003"))
    state = saved / "checkpoints/step_000002/state.json"
    state.write_text(state.read_text().replace("0.003", "0.007"))  # one that is damaged says nothing
    assert changed_settings.settings_of(saved).algorithm.lr == 0.001


@pytest.mark.parametrize("take", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:40])])
def test_without_its_settings_a_run_is_compared_with_its_checkpoint(saved, take):
    take(saved / "config.yaml")
    with refuses("run.dir", names="algorithm.lr=0.5"):
        lock.claim(asked(saved, "algorithm.lr=0.5"))
    if not (saved / "config.yaml").exists():
        lock.claim(asked(saved, "algorithm.lr=0.003"))


WAYS = {"link": Path.symlink_to, "dangling link": lambda path, _: path.symlink_to("nowhere")}
WAYS |= {"pipe": lambda path, _: os.mkfifo(path), "file": lambda path, _: path.touch()}
WAYS |= {"folder": lambda path, _: path.mkdir(), "device": lambda path, _: os.mknod(path, 0o20600, os.makedev(1, 3))}
NAMES = [".lock", "config.yaml", "data.json", "metrics.jsonl", "samples.jsonl", "samples.damaged", "eval.md"]
NAMES += ["vllm-0.log", "best", "checkpoints", "adapter", "tensorboard", "published", "vllm_modules"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_the_own_file_or_folder_of_a_run_is_refused(tmp_path, name, way):
    is_folder = name in NAMES[8:]
    if way in ("folder", "file") and is_folder == (way == "folder"):
        return
    if way == "device" and os.geteuid():
        pytest.skip("only root makes devices")
    other = tmp_path / "other"
    other.mkdir() if is_folder else other.write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    WAYS[way](folder / name, other)
    found = way.removeprefix("dangling ")
    with refuses("run.dir", names=f"{folder / name} is a {found}"):
        lock.claim(asked(folder))
    assert is_folder or other.read_text() == "mine"


def run_of_a_study():
    Path("study.yaml").write_text("arms: {arm: }")
    study = read_study(Path("study.yaml"))
    return partial(Runner(study)._run, next(study.runs()), [], ())


# What makes ready to write a file of this name.
WRITES = {
    ".lock": lambda: partial(lock._lock, Path()),
    "metrics.jsonl": lambda: partial(Journal(Path(), 0)._append, "metrics.jsonl", {}),
    "vllm-0.log": lambda: partial(process._start, ["false"], (), Path("vllm-0.log")),
    "runs/study/arm-0.log": run_of_a_study,
}


@pytest.mark.parametrize("link", WRITES)
def test_a_link_never_leads_a_write_elsewhere(tmp_path, monkeypatch, link):
    """Also one that is made after the folder was looked at."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_text("mine")
    write = WRITES[link]()
    (tmp_path / link).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / link).symlink_to(tmp_path / "other")
    with pytest.raises((ConfigError, OSError), match="Too many levels of symbolic links"):
        write()
    assert (tmp_path / "other").read_text() == "mine"


def test_two_runs_without_a_name_in_one_second_have_a_folder_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = [create.folder_of(Request(resolve("nano"), "nano", "")) for _ in range(20)]
    assert (len(set(names)), all(name.is_dir() for name in names)) == (20, True)
    assert {len(name.name) for name in names} <= {20, 22, 23}  # nano-20260101-000000, and some with -2 or -12


def test_checkpoints_that_cannot_be_read_are_no_reason_to_delete_a_run():
    """As an ordinary user, where root is refused nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "checkpoints/step_000002").mkdir(parents=True)
        for path in (folder, folder / "checkpoints"):
            os.chown(path, 65534 if os.geteuid() == 0 else -1, -1)
        before = os.geteuid()
        request = asked(folder)
        try:
            os.seteuid(before or 65534)
            for mode in (0, 0o300):
                (folder / "checkpoints").chmod(mode)
                for look in (lambda: lock.claim(request), lambda: checkpoints.latest(folder)):
                    with refuses(folder / "checkpoints", CheckpointError, names="chmod u+rwx"):
                        look()
            (folder / "checkpoints").chmod(0o700)
            assert checkpoints.latest(folder)
        finally:
            os.seteuid(before)


def test_the_memory_of_the_machine_is_kept_for_the_alarm_of_a_leak(tmp_path):
    (tmp_path / "config.yaml").write_text(resolve("nano").to_yaml())
    create.write_machine(tmp_path, resolve("nano"))
    assert read_run(tmp_path).history.memory == pytest.approx(total_memory() / 1e9, abs=0.01)
