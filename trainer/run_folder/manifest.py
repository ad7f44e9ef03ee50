"""The manifest of a checkpoint, which its ranks write and check together: each computes its share of the checksums."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.machine import disk, manifest
from trainer.ranks import distributed


def seal(folder: Path) -> None:
    """Write the manifest of a folder, and have the disk keep everything in it. Every rank calls it."""
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
