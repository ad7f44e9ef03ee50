"""Whether a run was stopped, as far as its folder tells."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

from trainer.run_folder.reader import RunFiles, phases

# File systems whose locks are those of this machine alone, so that one that is free is held by no run.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
MOUNTS = Path("/proc/mounts")
WRITTEN = ("config.yaml", ".lock", "metrics.jsonl", "samples.jsonl")  # when a run begins, and after each step
PATIENCE_S, PATIENCE_STEPS = 60.0, 3  # without a record, after which a run elsewhere counts as stopped


def stopped(run: RunFiles) -> str | None:
    """Return what to say of a run that was stopped; None if it goes on or has ended.

    A run holds the lock of its folder. The lock of a run on another node cannot be seen, so what counts there is the
    time since its last record.
    """
    if run.has_ended or _is_locked(run.folder):
        return None
    if _is_local(run.folder):
        return f"stopped after step {run.steps}"
    written = [path.stat().st_mtime for path in map(run.folder.joinpath, WRITTEN) if path.exists()]
    silent = time.time() - max(written)
    if silent < max(PATIENCE_S, PATIENCE_STEPS * _longest_step(run)):
        return None
    return f"nothing for {silent / 60:.0f} min"


def _is_locked(folder: Path) -> bool:
    try:
        with (folder / ".lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is no lock, or the file system has none
        pass
    return False


def _is_local(folder: Path) -> bool:
    mounts = [line.split() for line in MOUNTS.read_text().splitlines()] if MOUNTS.exists() else []
    around = [(len(place), kind) for _, place, kind, *_ in mounts if folder.resolve().is_relative_to(place)]
    return max(around, default=(0, ""))[1] in LOCAL


def _longest_step(run: RunFiles) -> float:
    """Return the seconds of the longest step, with its evaluation."""
    names = [f"time/{name}" for name in (*phases(run.metrics), "evaluation")]
    return max((sum(record.get(name, 0.0) for name in names) for record in run.metrics), default=0.0)
