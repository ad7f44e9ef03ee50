"""Tell whether a run was stopped, from the lock of its folder and the time of its last record."""

import time

import psutil

from trainer.machine import disk
from trainer.run_folder.layout import checkpoints, step_of
from trainer.run_folder.reader import RunFiles, seconds_of

# File systems that only this machine uses, so that a lock that is free here is not held by any run.
LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}
WRITTEN = ("config.yaml", ".lock", "metrics.jsonl", "samples.jsonl")  # at the start of a run, and after each step
PATIENCE_S, PATIENCE_STEPS = 60.0, 3  # a run on another node counts as stopped after this time without a record


def stopped(run: RunFiles) -> str | None:
    """Return how a run was stopped, or None if it is running or has ended. A running process holds the lock of its
    folder. Locks of other nodes are not visible here, so the time since the last record decides for their runs."""
    if run.has_ended or disk.is_locked(run.folder / ".lock"):
        return None
    if run.current is not run:
        return stopped(run.current)
    mounts = [one for one in psutil.disk_partitions(all=True) if run.folder.resolve().is_relative_to(one.mountpoint)]
    mounts.sort(key=lambda mount: len(mount.mountpoint))  # of several mounts on one place, the last is on top
    if mounts and mounts[-1].fstype in LOCAL:
        saved = max(map(step_of, checkpoints(run.folder)), default=0)
        then = f"continues after step {saved}" if saved else "starts again"
        lost = f" without saving it, because it failed or was killed; it {then}" if saved < run.steps else ""
        return f"stopped after step {run.steps}{lost}"
    written = [path.stat().st_mtime for path in map(run.folder.joinpath, WRITTEN) if path.exists()]
    silent = time.time() - max(written)
    longest = max((seconds_of(record) + record.get("time/evaluation", 0.0) for record in run.metrics), default=0.0)
    if silent < max(PATIENCE_S, PATIENCE_STEPS * longest):
        return None
    return f"nothing was written for {silent / 60:.0f} min"
