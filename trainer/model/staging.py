"""Copies the model to a local disk, once per node and not once per rank.

`OCTET_SCRATCH` names a folder on that disk. It belongs to the machine and is not a setting of the run; run folders
record the model's own name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from trainer.config.settings import Model
from trainer.machine import disk
from trainer.model import hub
from trainer.ranks import distributed


def stage(settings: Model) -> None:
    """Copy the model, or warn if that is impossible. Every rank calls it before the model is loaded."""
    if os.environ.get("OCTET_SCRATCH") and distributed.is_first_here():
        try:
            place, source = _place(settings), _source(settings)
            if place and source and not staged_copy(settings):
                # under a temporary name until it is complete: other jobs on this node may read or copy it
                partial = place.with_name(f"{place.name}.{os.getpid()}")
                disk.private_folder(place.parent)
                if os.path.lexists(place):
                    disk.private_folder(place)
                try:
                    shutil.copytree(source, partial)
                    partial.chmod(0o700)
                    if not place.is_dir():
                        partial.rename(place)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            reason = f"{settings.name} cannot be copied there ({error.strerror or error})"
            print(f"octet: warning: OCTET_SCRATCH: {reason}. It is read from where it is.", file=sys.stderr, flush=True)
    distributed.barrier()


def staged_copy(settings: Model) -> Path | None:
    """Return the copy on this node, if there is a complete one that nobody but this user can have made."""
    try:
        place = _place(settings)
    except OSError:  # a file cannot be read, of which `stage` has warned
        return None
    is_ours = place and place.is_dir() and disk.is_private(place.parent) and disk.is_private(place)
    return place if is_ours else None


def _place(settings: Model) -> Path | None:
    """Return the path of the copy. It depends on the files of the model, so another version gets another copy."""
    scratch = os.environ.get("OCTET_SCRATCH")
    source = _source(settings) if scratch else None
    if not scratch or source is None:
        return None
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.iterdir())
    key = hashlib.sha256(repr((str(source.resolve()), files)).encode()).hexdigest()[:12]
    return Path(scratch) / f"octet-models-{os.geteuid()}" / f"{Path(settings.name).name}-{key}"


def _source(settings: Model) -> Path | None:
    """Return the folder of the model, which may be in the hub's cache."""
    if settings.name == "nano":
        return None  # it is small, and part of the package
    return hub.local_folder(settings.name) or hub.snapshot(settings)
