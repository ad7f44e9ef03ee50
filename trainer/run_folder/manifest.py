"""The checksums of a checkpoint, in its `manifest.json`. They find accidental damage; they are no protection against
somebody who writes into the folder, because that includes the manifest."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path

from trainer.machine import disk
from trainer.ranks import distributed

NAME = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20
OTHER = "it was written by another version of Octet"


def seal(folder: Path) -> None:
    """Write the manifest of a folder, and have the disk keep everything in it. Every rank calls it."""
    sums = _checksums(folder, distributed.gather(sorted(_files(folder)))[0])
    for name in distributed.mine(list(sums)):
        disk.keep(folder / name)
    if distributed.is_main():
        (folder / NAME).write_text(json.dumps({"format": FORMAT, "files": sums}, indent=1) + "\n")
        for path in [folder / NAME, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
            disk.keep(path)
    distributed.barrier()


def damage(folder: Path) -> str:
    """Return what is wrong with a folder, or "" if it is as it was sealed. Every rank calls it and gets the same."""
    sums, wrong = distributed.gather(_read(folder) if distributed.is_main() else ({}, ""))[0]
    found = _checksums(folder, sums)
    return wrong or ", ".join(f"{name} is not what was saved" for name in sums if found[name] != sums[name])


def _read(folder: Path) -> tuple[dict[str, int], str]:
    """Return the checksums in the manifest, and what is wrong without computing any."""
    try:
        manifest = json.loads((folder / NAME).read_text())
        form, sums = manifest["format"], dict(manifest["files"])
    except FileNotFoundError:
        return {}, f"it has no {NAME}"
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return {}, f"{NAME} cannot be read"
    if form != FORMAT:
        return {}, f"{OTHER}: {NAME} has format {str(form)[:50]}, and this one reads format {FORMAT}"
    missing = sorted(sums.keys() - _files(folder))
    return ({}, f"{', '.join(missing)} is missing") if missing else (sums, "")


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _checksums(folder: Path, names: Iterable[str]) -> dict[str, int | None]:
    """Return the checksum of each file, None if there is no such file. Each rank reads its share of the files."""
    sums: dict[str, int | None] = {}
    for part in distributed.gather({name: _checksum(folder / name) for name in distributed.mine(list(names))}):
        sums |= part
    return sums


def _checksum(path: Path) -> int | None:
    checksum = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                checksum = zlib.crc32(block, checksum)
    except FileNotFoundError:  # any other error may pass: the checkpoint is not damaged by it
        return None
    return checksum
