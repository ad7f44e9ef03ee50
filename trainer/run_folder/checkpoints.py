"""Checkpoints, which are complete or do not exist.

    checkpoints/step_000100/adapter/        PEFT format, usable by itself; absent if the whole model is trained
                            engine/         the trained weights, their master copies and the optimizer state
                            state.json      the number of steps done, and what a run has learned beside the weights
                            manifest.json   the checksum of every other file
    checkpoints/latest                      link to the newest complete one

A checkpoint is written under a temporary name, synced, and renamed when every rank is done. Older ones are deleted
after it has been read back. Problems and random numbers of a step follow from the seed, the step and the curriculum, so
there is no cursor and no generator state to store.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from trainer.errors import CheckpointError, OctetError
from trainer.machine import disk, manifest
from trainer.machine.safe_text import visible
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.run_folder import journal, layout
from trainer.run_folder.layout import step_of

_whole: dict[Path, bool] = {}  # checkpoints that this process has written or read, and whether they are undamaged


class Stateful(Protocol):
    """State that a run has beside its weights, the same on every rank."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


# The parts of state.json by name, in the order in which they are loaded; `run/assemble.py` names them.
Learned = Mapping[str, Stateful]


def save(policy: Policy, run_folder: Path, step: int, keep: int, learned: Learned) -> None:
    """Save a checkpoint after `step` updates. Every rank calls it."""
    final = run_folder / "checkpoints" / f"step_{step:06d}"
    partial, before = final.with_name(f"{final.name}.partial"), layout.checkpoints(run_folder)[-1:]
    then = f"`--resume` then continues from {before[0].name}" if before else "the same command then starts again"
    remedy = f"Make room, or write run.keep=1; {then}."
    with disk.writing(partial, f"the checkpoint of step {step}", remedy, sum(map(disk.size, before))):
        if distributed.is_main():
            disk.remove(partial)
            partial.mkdir(parents=True)
        distributed.barrier()
        policy.save(partial)
        if distributed.is_main():
            state = {name: part.state() for name, part in learned.items()}
            (partial / "state.json").write_text(json.dumps({"step": step, **state}))
        distributed.barrier()
        seal(partial)
    if distributed.is_main():
        _publish(partial, final)
    distributed.barrier()
    if wrong := damage(final):
        raise CheckpointError(final, f"{wrong}, though it was written a moment ago", f"Check the disk; {then}").of_all()
    _whole[final] = True
    if distributed.is_main():
        for later in [path for path in layout.checkpoints(run_folder) if step_of(path) > step]:  # damaged ones
            shutil.rmtree(later)
    _delete_earlier(run_folder, keep)


def latest(run_folder: Path) -> Path | None:
    """Return the newest checkpoint, which may be damaged. Raise CheckpointError if all have disappeared."""
    folder = run_folder / "checkpoints"
    if saved := layout.checkpoints(run_folder):
        return saved[-1]
    if (folder / "latest").is_symlink() or any((run_folder / product).exists() for product in ("adapter", "model")):
        reason = "no checkpoint is left in it, so the run cannot continue"
        raise CheckpointError(folder, reason, f"Choose another run.dir, or delete {run_folder} to start again")
    return None


def resume(policy: Policy, run_folder: Path, keep: int, learned: Learned) -> int:
    """Load the newest undamaged checkpoint and return its number of updates, or 0 if there are no checkpoints."""
    if distributed.gather(latest(run_folder) is None)[0]:
        return 0
    for path in distributed.gather([str(path) for path in layout.checkpoints(run_folder)[::-1]])[0]:
        folder = Path(path)
        wrong = _unusable(folder)
        _whole[folder] = not wrong
        if wrong.startswith(manifest.OTHER):
            raise CheckpointError(folder, visible(wrong), "Continue with that version, or delete it").of_all()
        if not wrong:
            step = _load(policy, folder, learned)
            _delete_earlier(run_folder, keep)  # a damaged later one counts for none
            return step
        if distributed.is_main():
            journal.warn(f"{folder} is damaged and not used: {wrong}")
    remedy = f"Restore one, or delete {run_folder} to start again"
    raise CheckpointError(run_folder / "checkpoints", "every checkpoint in it is damaged", remedy).of_all()


def seal(folder: Path) -> None:
    """Sync the files of a checkpoint to disk, and write its manifest. Every rank calls it."""
    sums = _checksums(folder, distributed.gather(sorted(manifest.files(folder)))[0])
    for name in distributed.mine(list(sums)):
        disk.keep(folder / name)
    if distributed.is_main():
        manifest.write(folder, sums)
    distributed.barrier()


def damage(folder: Path) -> str:
    """Return what is wrong with a sealed folder, or "" if it is unchanged. Every rank calls it and gets the same."""
    sums, wrong = distributed.on_main(lambda: manifest.read(folder))
    return wrong or manifest.unlike(sums, _checksums(folder, sums))


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Return the checksum of each file, or None for a missing file. Each rank reads its share of the files."""
    sums = {name: manifest.checksum(folder / name) for name in distributed.mine(list(names))}
    return {name: checksum for of_rank in distributed.gather(sums) for name, checksum in of_rank.items()}


def _unusable(folder: Path) -> str:
    """Return what is wrong with a checkpoint, or "" if it can be loaded. Every rank calls it and gets the same."""
    if wrong := damage(folder):
        return wrong
    try:
        step = json.loads((folder / "state.json").read_text())["step"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return "state.json cannot be read"
    return "" if step == step_of(folder) else f"it is the checkpoint of step {step}"


def _load(policy: Policy, folder: Path, learned: Learned) -> int:
    state = json.loads((folder / "state.json").read_text())
    try:
        for name, part in learned.items():
            part.load(state[name])
    except OctetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        reason = f"state.json is not one of this version of Octet ({type(error).__name__}: {visible(str(error))[:200]})"
        remedy = f"Continue with the version that wrote it, or delete {folder.parent.parent} to start again"
        raise CheckpointError(folder, reason, remedy) from None
    policy.load(folder)
    return int(state["step"])


def _publish(partial: Path, final: Path) -> None:
    disk.remove(final)  # a checkpoint of the same step from an earlier attempt
    partial.rename(final)
    link, latest = (final.with_name(name) for name in ("latest.partial", "latest"))
    with suppress(OSError):  # a file system without links, such as exFAT: only people read it
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        if not latest.is_symlink():  # copying the run has replaced the link by a folder
            disk.remove(latest)
        os.replace(link, latest)
    disk.keep(final.parent)


def _delete_earlier(run_folder: Path, keep: int) -> None:
    """Delete the checkpoints that are older than the newest `keep` undamaged ones. Every rank calls it."""
    earlier = [Path(path) for path in distributed.gather([str(path) for path in layout.checkpoints(run_folder)])[0]]
    if len(earlier) <= keep:
        return
    whole = 0
    while earlier and whole < keep:
        path = earlier.pop()
        if path not in _whole:
            _whole[path] = not _unusable(path)
        whole += _whole[path]
    if distributed.is_main():
        for path in earlier:
            shutil.rmtree(path)
    distributed.barrier()
