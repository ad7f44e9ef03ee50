"""Key-value stores through which the ranks exchange messages: files on one machine, else torch's TCPStore at rank 0.

The files are in a folder that only this user can enter, and reading them needs no other process. A call to the TCPStore
does not return while rank 0 is stopped or unreachable, so all calls are made `within` a time limit.
"""

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch.distributed as dist

from trainer.machine import disk, threads
from trainer.ranks.slurm import FOLDER

T = TypeVar("T")
UNREACHABLE = (dist.DistError, OSError)  # the errors that a call to a store raises
LOOPBACK = ("127.0.0.1", "localhost")
GROUP = "group"  # torch's file in the folder


class FolderStore:
    """A store with a file for each key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        partial = self._file(uuid4().hex)
        partial.write_text(value)
        partial.replace(self._file(key))

    def get(self, key: str) -> bytes:
        return self._file(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def add(self, key: str, number: int) -> int:
        """Add to a number and return the sum. Only one rank may change it."""
        count = number + (int(self.get(key)) if self.check([key]) else 0)
        if number:
            self.set(key, str(count))
        return count

    def _file(self, key: str) -> Path:
        return self.folder / key.replace("/", ".")


def connect(rank: int, seconds: float) -> Any:
    """Return the store of this start of the run. Rank 0 creates it."""
    port, restarts = os.environ["MASTER_PORT"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if not is_one_machine():
        is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        options: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(port), is_master=is_server, **options)
        return dist.PrefixStore(f"octet-{restarts}", store)
    default = Path(tempfile.gettempdir()) / f"octet-ranks-{os.geteuid()}"
    folder = disk.private_folder(Path(os.environ.get(FOLDER, default))) / f"{port}-{restarts}"
    if rank == 0:
        return FolderStore(_create(folder))
    until = time.monotonic() + seconds
    while not _is_in_use(folder):  # an earlier start may have left an unused folder
        if time.monotonic() > until:
            raise dist.DistNetworkError(f"it has not created {folder}")
        time.sleep(0.05)
    return FolderStore(folder)


def is_one_machine() -> bool:
    """Return True if all ranks are on this machine, according to the launcher or to the address of rank 0."""
    here, ranks = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    return ranks in ("1", here) or (here is None and os.environ["MASTER_ADDR"] in LOOPBACK)


def another(store: Any, seconds: float) -> Any:
    """Return a second connection to a store, for another thread, because the first may be blocked in a call."""
    if isinstance(store, FolderStore):
        return store
    other = store.clone()
    other.set_timeout(timedelta(seconds=seconds))
    return other


def for_group(store: Any, ranks: int) -> Any:
    """Return the store through which torch connects the process group."""
    if isinstance(store, FolderStore):
        return dist.FileStore(str(store.folder / GROUP), ranks)
    return dist.PrefixStore("group", store)


def close(store: Any) -> None:
    """Delete the files, unless torch's file exists: then another rank has not left yet, and torch would abort it."""
    if isinstance(store, FolderStore) and not (store.folder / GROUP).exists():
        shutil.rmtree(store.folder, ignore_errors=True)


def _create(folder: Path) -> Path:
    """Create a folder that is locked until this process ends, and delete the folders of killed runs."""
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        if _is_in_use(folder):
            raise OSError(errno.EADDRINUSE, "another run uses this MASTER_PORT", str(folder))
        for other in {folder, *(lock.parent for lock in folder.parent.glob("*/lock"))}:
            if not _is_in_use(other):
                shutil.rmtree(other, ignore_errors=True)
        new = Path(tempfile.mkdtemp(dir=folder.parent))
        fcntl.flock(os.open(new / "lock", os.O_WRONLY | os.O_CREAT, 0o600), fcntl.LOCK_EX)
        return new.rename(folder)
    finally:
        os.close(parent)


def _is_in_use(folder: Path) -> bool:
    """Return True while the process that has created the folder is running."""
    return disk.is_locked(folder / "lock")


def absent(store: Any, keys: Sequence[str], seconds: float) -> list[int]:
    """Wait until all keys are written, at most `seconds`. Return the indices of those that are not."""
    deadline = time.monotonic() + seconds
    missing = [place for place, key in enumerate(keys) if not store.check([key])]
    while missing and time.monotonic() < deadline:
        time.sleep(0.05)
        missing = [place for place in missing if not store.check([keys[place]])]
    return missing


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of a function, or raise DistNetworkError after `seconds`, while its thread keeps waiting."""
    answer = threads.begin(call)
    done, _ = futures.wait([answer], seconds)
    if not done:
        raise dist.DistNetworkError(f"no answer within {seconds:g} s")
    return answer.result()
