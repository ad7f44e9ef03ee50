"""Checkpoints: whole or not there at all.

    checkpoints/step_000100/adapter/        PEFT format, usable by itself; not when the whole model is trained
                            engine/         what is trained, its master weights and optimizer state
                            state.json      the step to go on with, and what a run has learned beside the weights
                            manifest.json   the checksum of every other file
    checkpoints/latest                      link to the last whole one

A checkpoint is written under a temporary name, synced, and renamed when every rank is done. Older ones are deleted when
it has been read back. Problems and random numbers of a step follow from the seed, the step and the curriculum, so there
is no cursor and no generator state to keep.
"""

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from trainer.errors import CheckpointError, OctetError
from trainer.machine import disk, manifest
from trainer.machine.visible import visible
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.run_folder import previous_run

_whole: dict[Path, bool] = {}  # whether a checkpoint is whole, of those that this process has written or read


class Stateful(Protocol):
    """What a run has learned beside the weights. It is the same on every rank."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class Learned(NamedTuple):
    """The parts of state.json, in the order in which they are loaded. A new part is a field here."""

    origin: Stateful
    curriculum: Stateful
    kl: Stateful
    logs: Stateful


def save(policy: Policy, run_folder: Path, step: int, keep: int, learned: Learned) -> None:
    """Save a checkpoint after `step` updates. Every rank calls it."""
    final = run_folder / "checkpoints" / f"step_{step:06d}"
    partial, before = final.with_name(f"{final.name}.partial"), previous_run.checkpoints(run_folder)[-1:]
    goes_on = f"goes on from {before[0].name}" if before else "begins anew"
    remedy = f"Make room, or write run.keep=1; the same command then {goes_on}."
    with disk.writing(partial, f"the checkpoint of step {step}", remedy, sum(map(disk.size, before))):
        _write(policy, partial, step, learned)
    if distributed.is_main():
        _publish(partial, final)
    distributed.barrier()
    if wrong := damage(final):
        reason = f"{wrong}, though it was written a moment ago"
        raise CheckpointError(final, reason, f"Check the disk; the same command then {goes_on}").of_all()
    _whole[final] = True
    if distributed.is_main():
        for later in [path for path in previous_run.checkpoints(run_folder) if _step(path) > step]:  # damaged ones
            shutil.rmtree(later)
    _delete_earlier(run_folder, step, keep)


def _write(policy: Policy, partial: Path, step: int, learned: Learned) -> None:
    if distributed.is_main():
        disk.remove(partial)
        partial.mkdir(parents=True)
    distributed.barrier()
    policy.save(partial)
    if distributed.is_main():
        state: dict[str, Any] = {"step": step}
        state |= {name: part.state() for name, part in learned._asdict().items()}
        (partial / "state.json").write_text(json.dumps(state))
    distributed.barrier()
    seal(partial)


def latest(run_folder: Path) -> Path | None:
    """Return the newest checkpoint, which may be damaged. Raise if there were some and none is left."""
    folder = run_folder / "checkpoints"
    if saved := previous_run.checkpoints(run_folder):
        return saved[-1]
    if (folder / "latest").is_symlink() or any((run_folder / product).exists() for product in ("adapter", "model")):
        reason = "no checkpoint is left in it, so the run cannot go on"
        raise CheckpointError(folder, reason, f"Choose another run.dir, or delete {run_folder} to begin anew")
    return None


def resume(policy: Policy, run_folder: Path, keep: int, learned: Learned) -> int:
    """Load the newest checkpoint that is not damaged, and return the number of updates that are done; 0 without one."""
    if distributed.gather(latest(run_folder) is None)[0]:
        return 0
    for path in distributed.gather([str(path) for path in previous_run.checkpoints(run_folder)[::-1]])[0]:
        folder = Path(path)
        wrong = _unusable(folder)
        _whole[folder] = not wrong
        if wrong.startswith(manifest.OTHER):
            raise CheckpointError(folder, visible(wrong), "Go on with that version, or delete it").of_all()
        if wrong:
            if distributed.is_main():
                warning = f"octet: warning: {folder} is damaged and not used: {visible(wrong)[:500]}"
                print(warning, file=sys.stderr, flush=True)
        else:
            step = _load(policy, folder, learned)
            _delete_earlier(run_folder, step, keep)
            return step
    remedy = f"Restore one, or delete {run_folder} to begin anew"
    raise CheckpointError(run_folder / "checkpoints", "every checkpoint in it is damaged", remedy).of_all()


def seal(folder: Path) -> None:
    """Write the manifest of a checkpoint, and have the disk keep everything in it. Every rank calls it."""
    sums = _checksums(folder, distributed.gather(sorted(manifest.files(folder)))[0])
    for name in distributed.mine(list(sums)):
        disk.keep(folder / name)
    if distributed.is_main():
        manifest.write(folder, sums)
    distributed.barrier()


def damage(folder: Path) -> str:
    """Return what is wrong with a folder, or "" if it is as it was sealed. Every rank calls it and gets the same."""
    sums, wrong = distributed.gather(manifest.read(folder) if distributed.is_main() else ({}, ""))[0]
    return wrong or manifest.unlike(sums, _checksums(folder, sums))


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Return the checksum of each file, None if there is no such file. Each rank reads its share of the files."""
    sums: dict[str, int | None] = {}
    for part in distributed.gather({name: manifest.checksum(folder / name) for name in distributed.mine(list(names))}):
        sums |= part
    return sums


def _unusable(folder: Path) -> str:
    """Return what is wrong with a checkpoint, or "" if it can be loaded. Every rank calls it and gets the same."""
    if wrong := damage(folder):
        return wrong
    try:
        step = json.loads((folder / "state.json").read_text())["step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "state.json cannot be read"
    return "" if step == _step(folder) else f"it is the checkpoint of step {step}"


def _load(policy: Policy, folder: Path, learned: Learned) -> int:
    state = json.loads((folder / "state.json").read_text())
    try:
        for name, part in learned._asdict().items():
            part.load(state[name])
    except OctetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"state.json is not one of this version of Octet ({type(error).__name__}: {visible(str(error))[:200]})"
        remedy = f"Go on with the version that wrote it, or delete {folder.parent.parent} to begin anew"
        raise CheckpointError(folder, reason, remedy) from None
    try:
        policy.load(folder)
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        reason = "its weights have other shapes than those of this model and adapter"
        remedy = f"Write the settings that the run had, or delete {folder.parent.parent} to begin anew"
        raise CheckpointError(folder, reason, remedy) from None
    return int(state["step"])


def _publish(partial: Path, final: Path) -> None:
    disk.remove(final)  # the same step of an earlier try
    partial.rename(final)
    link, latest = (final.with_name(name) for name in ("latest.partial", "latest"))
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    if not latest.is_symlink():  # a copy of the run has followed the link
        disk.remove(latest)
    os.replace(link, latest)
    disk.keep(final.parent)


def _delete_earlier(run_folder: Path, step: int, keep: int) -> None:
    """Delete, on all ranks, what is older than the newest `keep` whole checkpoints."""
    saved = [str(path) for path in previous_run.checkpoints(run_folder) if _step(path) <= step]
    found = [Path(path) for path in distributed.gather(saved)[0]]
    if len(found) <= keep:
        return
    whole = 0
    while found and whole < keep:
        path = found.pop()
        if path not in _whole:
            _whole[path] = not _unusable(path)
        whole += _whole[path]
    if distributed.is_main():
        for path in found:
            shutil.rmtree(path)
    distributed.barrier()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))
