"""Write so that a crash leaves nothing half written, and give one clear error when the disk fills up."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import CheckpointError

FULL = (errno.ENOSPC, errno.EDQUOT)
PROBE_BYTES = 1 << 20


@contextmanager
def writing(folder: Path, what: str, remedy: str, needed: int = 0) -> Iterator[None]:
    """Turn a full disk into a CheckpointError, and delete `folder`, which is new. `needed` is its size, if known. Give
    its files the permissions that all files of a run have."""
    try:
        yield
        for file in folder.rglob("*.safetensors"):  # which only their owner could read
            follow_umask(file)
    except Exception as error:
        if not _is_full(error, folder):
            raise
        written = size(folder)
        room = written + shutil.disk_usage(folder.parent).free
        shutil.rmtree(folder, ignore_errors=True)
        wanted = amount(needed) if needed > written else f"more than {amount(written)}"
        raise CheckpointError(
            f"{folder.parent}: the disk is full: {what} needs {wanted}, and {amount(room)} were free. {remedy}"
        ) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    """Return True if the disk is full. safetensors says so in its message; torch does not, so try to write a file."""
    if isinstance(error, OSError):
        return error.errno in FULL
    if any(os.strerror(number) in str(error) for number in FULL):
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0" * PROBE_BYTES)
    except OSError as full:
        return full.errno in FULL
    return False


def follow_umask(path: Path) -> None:
    """Give a file the permissions of the umask, where a library has made it with others. The umask is read from /proc,
    because os.umask() would change it for other threads."""
    found = re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found:
        path.chmod(0o666 & ~int(found[1], 8))


def keep(path: Path) -> None:
    """Have the disk keep a file or a folder, and forget its copy in memory, so that it is read from the disk next."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(number)


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole, so that a crash leaves the old one or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    keep(partial)
    partial.replace(path)


def size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def amount(count: float) -> str:
    """Format a number of bytes."""
    unit, divisor = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / divisor:.1f} {unit}"
