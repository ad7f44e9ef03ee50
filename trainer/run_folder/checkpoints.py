"""Checkpoints: whole or not there at all.

    checkpoints/step_000100/adapter/      PEFT format, usable by itself; not when the whole model is trained
                            engine/       what is trained, its master weights and optimizer state
                            state.json    the step to go on with, and what a run has learned beside the weights
    checkpoints/latest                    link to the last whole one

A checkpoint is written under a temporary name and renamed when every rank is done. Problems and random numbers of a
step follow from the seed, the step, the rank and the curriculum, so there is no cursor and no generator state to keep.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import CheckpointError
from trainer.machine import disk
from trainer.policy import Policy
from trainer.ranks import distributed


class Stateful(Protocol):
    """What a run has learned beside the weights. It is the same on every rank."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


def save(policy: Policy, run_folder: Path, step: int, keep: int, learned: Mapping[str, Stateful]) -> None:
    """Save a checkpoint after `step` updates. Every rank calls it."""
    final = run_folder / "checkpoints" / f"step_{step:06d}"
    partial, before = final.with_name(f"{final.name}.partial"), _whole(final.parent)[-1:]
    goes_on = f"goes on from {before[0].name}" if before else "begins anew"
    remedy = f"Make room, or write run.keep=1; the same command then {goes_on}."
    with disk.writing(partial, f"the checkpoint of step {step}", remedy, sum(map(disk.size, before))):
        _write(policy, partial, step, learned)
    if distributed.is_main():
        _publish(partial, final)
        for old in _whole(final.parent)[:-keep]:
            shutil.rmtree(old)
    distributed.barrier()


def _write(policy: Policy, partial: Path, step: int, learned: Mapping[str, Stateful]) -> None:
    if distributed.is_main():
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    distributed.barrier()
    policy.save(partial)
    if distributed.is_main():
        state: dict[str, Any] = {"step": step, "ranks": distributed.world_size()}
        state |= {name: part.state() for name, part in learned.items()}
        (partial / "state.json").write_text(json.dumps(state))
    distributed.barrier()


def latest(run_folder: Path) -> Path | None:
    """Return the checkpoint that `latest` names, else the newest complete one. Raise if there were some and none is
    left.
    """
    folder = run_folder / "checkpoints"
    link, whole = folder / "latest", _whole(folder)
    if link.exists():
        return link.resolve()
    if not whole and link.is_symlink():
        raise CheckpointError(f"{folder}: no checkpoint is left in it. Delete {run_folder} to begin anew.")
    return whole[-1] if whole else None


def resume(policy: Policy, run_folder: Path, learned: Mapping[str, Stateful]) -> int:
    """Load the last complete checkpoint, if there is one, and return the number of updates that are done."""
    folder = latest(run_folder)
    if folder is None:
        return 0
    try:
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: state.json cannot be read ({error}). Delete this folder to go on from the one before."
        ) from None
    if state["ranks"] != distributed.world_size():
        raise CheckpointError(
            f"{folder}: it was written by {state['ranks']} ranks, this run has {distributed.world_size()}. "
            "The optimizer state is split over the ranks: start with as many."
        )
    policy.load(folder)
    for name, part in learned.items():
        part.load(state[name])
    return int(state["step"])


def _publish(partial: Path, final: Path) -> None:
    shutil.rmtree(final, ignore_errors=True)  # the same step of an earlier try
    partial.rename(final)
    link = final.with_name("latest.partial")
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.with_name("latest"))


def _whole(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step_*") if path.is_dir() and path.suffix != ".partial")
