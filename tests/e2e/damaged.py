"""Runs whose files are damaged, one file in one way each, before the same command goes on.

python -m tests.e2e.damaged [CASE ...]        a case is RUN/FILE/WAY, such as stopped/best:best.json/pipe

A run of five steps is stopped in its last one, or has ended. What follows has to be equal to the undisturbed run, or to
be said by name, or to be refused by name. It may neither hang, nor end with a traceback, nor write through a link.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e import chaos

FILES = ["config.yaml", "data.json", "machine.json", "metrics.jsonl", "samples.jsonl", "verdict.json", "eval.json"]
FILES += [".lock", "best", "adapter", "checkpoints/latest", "checkpoints/step_000005"]
FILES += [f"{folder}/{name}" for folder in ("best", "adapter") for name in ("adapter_config.json", "manifest.json")]
FILES += [f"{folder}/adapter_model.safetensors" for folder in ("best", "adapter")] + ["best/best.json"]
FILES += [f"checkpoints/step_000004/{name}" for name in ("state.json", "manifest.json", "adapter/adapter_config.json")]
HANGS_S = 60.0
# No step reads these: what a replay compares, and the checkpoint before the one that an ended run has.
UNREAD = ("stopped/machine.json", "ended/machine.json", "ended/checkpoints/step_000004/")


def flipped(content: bytes) -> bytes:
    """One bit in the last digit of a text, or in the middle of other content."""
    digits = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    place = digits[-1] if digits and b"\0" not in content else len(content) // 2
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def _write(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """Return what changes a file, or each file of a folder."""

    def damage(path: Path, other: Path) -> None:
        for file in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
            file.write_bytes(change(file.read_bytes()))

    return damage


def _replace(make: Callable[[Path, Path], Any]) -> Callable[[Path, Path], None]:
    """Return what puts something else in the place of a file or a folder."""

    def damage(path: Path, other: Path) -> None:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
        make(path, other)

    return damage


def _copy(path: Path, other: Path) -> None:
    if other.is_dir():
        shutil.copytree(other, path)
    elif other.exists():
        shutil.copy(other, path)


WAYS = {
    "removed": _replace(lambda path, other: None),
    "truncated": _write(lambda content: content[: len(content) // 2]),
    "flipped": _write(lambda content: flipped(content) if content else content),
    "empty": _write(lambda content: b""),
    "NULs": _write(lambda content: bytes(len(content))),
    "other run's": _replace(_copy),
    "folder": _replace(lambda path, other: path.mkdir()),
    "pipe": _replace(lambda path, other: os.mkfifo(path)),
    "dangling link": _replace(lambda path, other: path.symlink_to("nowhere")),
    "link elsewhere": _replace(lambda path, other: path.symlink_to(other)),
}
CASES = [f"{run}/{name.replace('/', ':')}/{way}" for run in ("stopped", "ended") for name in FILES for way in WAYS]


def runs(place: Path) -> Iterator[str]:
    """Make the runs that are damaged, and another one. Yield what goes wrong."""
    for name, seed, stopped_at in (("ended", 0, None), ("stopped", 0, 5), ("other", 1, None)):
        (place / name).mkdir()
        with chaos.before_step(stopped_at, lambda: os.kill(os.getpid(), signal.SIGKILL)):
            ended = chaos.start(place / name / "run", 1, ["run.merge=false", f"run.seed={seed}"])
        if ended.statuses != [-signal.SIGKILL if stopped_at else 0]:
            yield f"{name}: {ended.said}"


def wrong(place: Path, case: str, undisturbed: dict[str, Any]) -> str:
    """Damage a copy of a run, let the same command go on, and return what is wrong with that, or ""."""
    run, name, way = case.split("/")
    folder = place / "copy" / "run"  # the same last name, which is in no file
    shutil.rmtree(folder.parent, ignore_errors=True)
    shutil.copytree(place / run, folder.parent, symlinks=True)
    other = place / "copy" / "other"
    shutil.copytree(place / "other" / "run", other, symlinks=True)
    before = chaos.result(other)
    path = name.replace(":", "/")
    if not os.path.lexists(folder / path):
        return ""
    WAYS[way](folder / path, other / path)
    ended = chaos.start(folder, 1, ["run.merge=false"], chaos.Moment(seconds=HANGS_S))
    if "Traceback" in ended.said or chaos.result(other) != before:
        return f"a traceback, or another run was changed: {ended.said[-2000:]}"
    is_named = any(part in ended.said for part in (path, path.split("/")[0] + " is"))
    if ended.statuses == [2]:
        return "" if is_named else f"refused without a name: {ended.said[-500:]}"
    if ended.statuses != [0]:
        return f"{ended.statuses}: {ended.said[-500:]}"
    different = chaos.differences(folder, undisturbed)
    if f"{run}/{path}".startswith(UNREAD):
        different = [name for name in different if name != path]
    is_said = is_named and "octet: warning: " in ended.said
    return f"silent, and not equal: {different}" if different and not is_said else ""


def main(cases: list[str]) -> int:
    """Print what is wrong with each case, and return how many are."""
    chaos.prepare()
    place = Path(tempfile.mkdtemp(prefix="octet-damaged-"))
    faults = list(runs(place))
    undisturbed = chaos.result(place / "ended" / "run")
    for case in [] if faults else cases or CASES:
        if found := wrong(place, case, undisturbed):
            faults.append(f"{case}: {found}")
            print(faults[-1], flush=True)
    shutil.rmtree(place)
    print(f"{len(cases or CASES)} cases, {len(faults)} faults {faults[:1]}")
    return len(faults)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
