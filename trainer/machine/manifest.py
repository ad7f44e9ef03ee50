"""Checksums of the files of a checkpoint, an adapter or a model, in its `manifest.json`. They detect accidental damage;
they are no protection against anybody who can write into the folder, which includes the manifest."""

import json
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import CheckpointError
from trainer.machine import disk
from trainer.machine.exits import finishing

NAME = "manifest.json"
FORMAT = 1
BLOCK = 1 << 20
OTHER = "it was written by another version of Octet"
NO_EFFECT = ("README.md",)  # files that people may edit


@contextmanager
def replacing(folder: Path, what: str, remedy: str) -> Iterator[Path]:
    """Yield a new folder to write a result into. Its files then replace those of `folder`, the manifest last."""
    partial = folder.with_name(f"{folder.name}.partial")
    disk.remove(partial)
    with disk.writing(partial, what, remedy):
        yield partial
        seal(partial)
    with finishing():
        replace(folder, partial)


def replace(folder: Path, partial: Path) -> None:
    """Move the files of `partial` over those of `folder`, or the rest of them after an interruption."""
    folder.mkdir(exist_ok=True)
    for path in sorted(partial.iterdir(), key=lambda path: path.name == NAME):
        disk.remove(folder / path.name)
        path.rename(folder / path.name)
    partial.rmdir()


def seal(folder: Path) -> None:
    """Write the manifest of a folder in its current state, and sync everything in it to the disk."""
    sums = {name: checksum(folder / name) for name in sorted(files(folder)) if name != NAME}  # an earlier one may exist
    for name in sums:
        disk.keep(folder / name)
    write(folder, sums)


def write(folder: Path, sums: Mapping[str, int | None]) -> None:
    """Write the manifest of a folder, and sync it to the disk."""
    (folder / NAME).write_text(json.dumps({"format": FORMAT, "files": dict(sums)}, indent=1) + "\n")
    for path in [folder / NAME, *(path for path in folder.rglob("*") if path.is_dir()), folder]:
        disk.keep(path)


def must_be_whole(folder: Path) -> None:
    """Raise CheckpointError if an adapter or a model differs from its manifest."""
    folder = folder.resolve()
    sealed = next((path for path in (folder, folder.parent) if (path / NAME).is_file()), None)
    if sealed and (wrong := damage(sealed, folder)):
        remedy = "Restore it from a copy, or resume the run, which writes its result again. If you have changed it "
        raise CheckpointError(folder, f"it is damaged: {wrong}", f"{remedy}yourself, delete {sealed / NAME}")


def damage(folder: Path, inside: Path | None = None) -> str:
    """Return a description of damage to the files of a folder, or of a folder inside it; "" if there is none."""
    sums, wrong = read(folder, inside)
    return wrong or unlike(sums, {name: checksum(folder / name) for name in sums})


def unlike(sums: Mapping[str, int], found: Mapping[str, int | None]) -> str:
    return ", ".join(f"{name} is not what was saved" for name in found if found[name] != sums[name])


def read(folder: Path, inside: Path | None = None) -> tuple[dict[str, int], str]:
    """Return the checksums in the manifest of a folder, or of a folder inside it, and a description of any defect."""
    try:
        if not stat.S_ISREG((folder / NAME).stat().st_mode):
            return {}, f"{NAME} is no file"
        manifest = json.loads((folder / NAME).read_text())
        form, sums = manifest["format"], dict(manifest["files"])
    except (FileNotFoundError, NotADirectoryError):
        return {}, f"it has no {NAME}"
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}, f"{NAME} cannot be read"
    if form != FORMAT:
        return {}, f"{OTHER}: {NAME} has format {str(form)[:50]}, and this one reads format {FORMAT}"
    sums = {name: value for name, value in sums.items() if (folder / name).is_relative_to(inside or folder)}
    missing = sorted(sums.keys() - files(folder))
    return ({}, f"{', '.join(missing)} is missing") if missing else (sums, "")


def files(folder: Path) -> set[str]:
    """Return the relative paths of the files that a manifest covers."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name not in NO_EFFECT)
    return {str(path.relative_to(folder)) for path in paths}


def checksum(path: Path) -> int | None:
    """Return the checksum of a file; None if there is no such file. Other errors of the disk, which are no damage, are
    raised."""
    checksum = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                checksum = zlib.crc32(block, checksum)
    except FileNotFoundError:
        return None
    return checksum
