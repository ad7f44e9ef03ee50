"""A disk that fills up while something is written: one clear error, and what was half written makes room again."""

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
    """`folder` is new, and goes again when the disk is full. `needed`: the bytes of it, where they are known."""
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
    """safetensors says it in its text, and takes its file away; torch does not say it, so it is tried."""
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
    """Bytes for a person."""
    unit, divisor = ("GB", 1e9) if count >= 1e9 else ("MB", 1e6)
    return f"{count / divisor:.1f} {unit}"
