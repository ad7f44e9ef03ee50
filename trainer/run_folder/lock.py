"""Claim a run folder for one run at a time, and refuse a folder that holds a run with other settings."""

import errno
import fcntl
import os
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

from trainer.config.request import Request
from trainer.errors import ConfigError
from trainer.machine import disk
from trainer.ranks import distributed, slurm
from trainer.run_folder import changed_settings, journal, layout
from trainer.run_folder.create import folder_of

LEFTOVER_S = 120.0  # a requeued job waits this long for the processes of its previous start
GLANCE_S = 1.0  # another process may be looking for a moment whether the folder is locked
_held: dict[Path, IO[str]] = {}  # the folders that this process has claimed, with their open lock files


def claim(request: Request) -> Path:
    """Lock the run folder and return it. Raise ConfigError if it is in use, or if its run has other settings."""
    folder = folder_of(request)
    distributed.keep_stacks_in(folder / "stacks")
    changed_settings.refuse_other_settings(folder, request.config)
    if not request.resumes:
        changed_settings.refuse_to_lengthen(folder, request.config)
    hold(folder)
    return folder


def hold(folder: Path) -> None:
    """Lock a folder until this process disconnects. Every rank calls it, before anything is written there."""
    layout.refuse_what_is_not_its_own(folder)
    if distributed.is_main() and not is_ours(folder):
        _lock(folder)
    distributed.barrier()


def is_ours(folder: Path) -> bool:
    """Return True if this process has claimed the folder, so that no other run writes into it."""
    return folder.resolve() in _held


def must_still_be_ours(folder: Path) -> None:
    """Raise ConfigError if the folder was deleted and made again by another run. Our lock file then has no name."""
    if lock := _held.get(folder.resolve()):
        with suppress(FileNotFoundError):
            if os.fstat(lock.fileno()).st_nlink < (folder / ".lock").stat().st_nlink:
                reason = "it was deleted during this run, and another run is writing to it"
                raise ConfigError(f"run.dir={folder}", reason, "Give each run a folder of its own")


def _lock(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", opener=disk.not_a_link)  # noqa: SIM115  open until the run ends
    except OSError as error:
        reason = f"it cannot be written ({error.strerror})"
        raise ConfigError(f"run.dir={folder}", reason, "Choose another folder") from None
    deadline = time.monotonic() + (LEFTOVER_S if slurm.restarts() else GLANCE_S)
    while not _is_free(lock):
        if time.monotonic() > deadline:
            lock.close()
            remedy = "Wait for it, or choose another folder"
            raise ConfigError(f"run.dir={folder}", "another run is writing to it", remedy)
        time.sleep(0.5)
    _held[folder.resolve()] = lock
    distributed.before_disconnect(partial(_release, folder.resolve()))


def _release(folder: Path) -> None:
    """Unlock a folder at the end of its run. Closing is not enough: a process forked by a reward may share the lock."""
    if lock := _held.pop(folder, None):
        with lock, suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        without = f"its file system has no locks ({error.strerror}), so make sure that no other run writes there"
        journal.warn(f"{Path(lock.name).parent}: {without}")
    return True
