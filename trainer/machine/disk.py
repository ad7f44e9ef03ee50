"""One clear error when the disk fills up during a write, and the removal of what was half written."""

from __future__ import annotations

import errno
import os
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
    """Turn a full disk into a CheckpointError, and delete `folder`, which is new. `needed` is its size, if known."""
    try:
        yield
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


def size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


def amount(count: float) -> str:
    """Format a number of bytes."""
    unit, divisor = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / divisor:.1f} {unit}"
