"""A copy of the model on a disk of the node, made once per node and not once per rank.

`OCTET_SCRATCH` names the disk. It is a place of the machine, so it is no setting of the run; what is written into run
folders is the model's own name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from trainer.config.settings import Model
from trainer.ranks import distributed


def stage(settings: Model) -> None:
    """Every rank calls it before the model loads. What cannot be copied is read from where it is."""
    if os.environ.get("OCTET_SCRATCH") and distributed.is_first_here():
        try:
            place, source = _place(settings), _source(settings)
            if place and source and not place.is_dir():
                _copy(source, place)
        except OSError as error:
            told = f"OCTET_SCRATCH: {settings.name} cannot be copied there ({error.strerror or error})"
            print(f"octet: warning: {told}. It is read from where it is.", file=sys.stderr, flush=True)
    distributed.barrier()


def copy_of(settings: Model) -> Path | None:
    """The copy on this node, if there is a whole one."""
    try:
        place = _place(settings)
    except OSError:  # a file of the model that cannot be read: said when it was to be copied
        return None
    return place if place and place.is_dir() else None


def _copy(source: Path, place: Path) -> None:
    """Under another name until it is whole: another job of this node may look for it, or make it too."""
    partial = place.with_name(f"{place.name}.{os.getpid()}")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        shutil.copytree(source, partial)
        if not place.is_dir():
            partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _place(settings: Model) -> Path | None:
    """Named after the model and what is in its folder, so that another version is another copy."""
    scratch = os.environ.get("OCTET_SCRATCH")
    source = _source(settings) if scratch else None
    if not scratch or source is None:
        return None
    files = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.iterdir())
    key = hashlib.sha256(repr((str(source.resolve()), files)).encode()).hexdigest()[:12]
    return Path(scratch) / "octet-models" / f"{Path(settings.name).name}-{key}"


def _source(settings: Model) -> Path | None:
    """The folder of the model: one that is named, or that of the hub's cache."""
    if settings.name == "nano":
        return None  # small, and in the package
    folder = Path(settings.name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(settings.name, revision=settings.revision, local_files_only=True))
    except (OSError, ValueError):  # not in the cache: it is about to be downloaded
        return None
