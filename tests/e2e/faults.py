"""Runs on a file system that fails, one start after the other in one folder: forks of this process.

LD_PRELOAD=faults.so python -m tests.e2e.faults RESULTS.json        faults.so is faults.c

Each start meets a fault of its own, says what it is, and ends with status 2; the last one comes to the end of the
undisturbed run. Another run has a slow disk, and a clock that goes back by a day with each line of its log.
"""

import ctypes
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from errno import EDQUOT, EIO, ENOLCK, ENOSPC, EROFS, ESTALE
from pathlib import Path
from typing import NamedTuple

from bench import machine
from tests.conftest import lines_of
from tests.e2e import chaos
from trainer.run_folder import checkpoints, layout


class Fault(NamedTuple):
    """What fails: the operations (see faults.c) of the paths with this text in them, after so many have succeeded."""

    part: str = ""
    operations: str = ""
    error: int = 0
    after: int = 0
    seconds: int = 0
    jump: int = 0


COMMAND = "python -m scripts.make_reliability_page --run"
OPERATIONS = {"o": "open", "w": "write", "f": "sync", "r": "rename", "l": "lock"}
NONE = Fault()
SLOW = Fault("/metrics.jsonl", "w", seconds=1, jump=-86_400)
NO_BOARD = Fault("/tensorboard/", "w", ENOSPC)
NO_LOCKS = Fault("/.lock", "l", ENOLCK)
FAULTS = {  # -> a part of the message
    Fault("/.lock", "o", EROFS): "it cannot be written (Read-only file system). Choose another folder.",
    Fault("/config.yaml", "w", EDQUOT): "run/config.yaml: the disk is full (Disk quota exceeded). Make room",
    Fault("/data.json", "w", EIO): "run/data.json: Input/output error. Check the disk",
    Fault("/metrics.jsonl", "w", EIO): "run/metrics.jsonl: Input/output error. Check the disk",
    Fault("/samples.jsonl", "w", ENOSPC): "run/samples.jsonl: the disk is full (No space left on device). Make room",
    Fault("/metrics.jsonl", "f", ESTALE): "run/metrics.jsonl.partial: Stale file handle. Check the disk",
    Fault("/engine/", "w", EIO): "the checkpoint of step 2 cannot be written (Input/output error). Check the disk",
    Fault("/step_000002.partial/", "w", ENOSPC): "the disk is full: the checkpoint of step 2 needs more than",
    Fault("/adapter/.tmp", "w", EDQUOT): "the quota of the disk is used up: the checkpoint of step 2 needs more than",
    Fault("/state.json", "w", EIO): "the checkpoint of step 2 cannot be written (Input/output error)",
    Fault("/manifest.json", "w", ENOSPC): "the disk is full: the checkpoint of step 2 needs more than",
    Fault("/step_000002", "r", EROFS): "step_000002.partial: Read-only file system.",
    Fault("/checkpoints", "f", EIO, 6): "the checkpoint of step 2 cannot be written (Input/output error)",
    Fault("/best", "w", EIO): "the best of the run cannot be written (Input/output error). Check the disk",
    Fault("/step_000004", "w", EIO): "the checkpoint of step 4 cannot be written (Input/output error)",
    Fault("/", "owr", EROFS, 60): "Read-only file system",
    Fault("/run/adapter", "w", ENOSPC): "the disk is full: the result needs more than",
    Fault("/verdict.json", "w", EIO): "run/verdict.json: Input/output error. Check the disk",
    Fault("/eval.json", "w", EIO): "run/eval.json: Input/output error. Check the disk",
    Fault("/eval_answers.jsonl", "w", ENOSPC): "run/eval_answers.jsonl: the disk is full (No space left on device)",
}


def start(folder: Path, fault: Fault) -> chaos.Ended:
    texts = [text.encode() for text in (f"/{folder.name}/", fault.part, fault.operations)]
    numbers = [ctypes.c_long(number) for number in fault[2:]]
    ctypes.CDLL(None).inject(*texts, *numbers)
    ended = chaos.start(folder, 1, [])
    ctypes.CDLL(None).inject(b"", b"", b"", *[ctypes.c_long(0)] * 4)
    return ended


def wrong(ended: chaos.Ended, status: int, told: str, folder: Path) -> str:
    """Return what is wrong with a start, or "" if it has ended with this status and this message."""
    if damaged := [path.name for path in layout.checkpoints(folder) if checkpoints.damage(path)]:
        return f"damaged: {damaged}"
    if ended.statuses == [status] and told in ended.said and "Traceback" not in ended.said:
        return ""
    return f"{ended.statuses}, not {told!r}: {ended.said[-900:]}"


def times(folder: Path) -> list[float]:
    lines = lines_of(folder / "metrics.jsonl")
    return [value for line in lines for key, value in line.items() if key.startswith("time/")]


def row(name: str, fault: Fault, told: str, what_is_wrong: str) -> dict[str, str]:
    """Return what bench/results/reliability.md says of a start."""
    failed = ", ".join(OPERATIONS[operation] for operation in fault.operations)
    return {"name": name, "fails": failed, "told": told, "wrong": what_is_wrong}


def rows(place: Path) -> Iterator[dict[str, str]]:
    undisturbed, slow, board, folder = (place / name for name in ("undisturbed", "slow", "board", "run"))
    yield row("none", NONE, "", wrong(start(undisturbed, NONE), 0, "", undisturbed))
    yield row("/metrics.jsonl", SLOW, "", wrong(start(slow, SLOW), 0, "", slow))
    seconds = times(slow)
    yield row("times in metrics.jsonl", NONE, "", "" if 0 <= min(seconds) <= max(seconds) < 600 else str(seconds))
    told = "tensorboard cannot be written (No space left on device), "
    yield row(NO_BOARD.part, NO_BOARD, told, wrong(start(board, NO_BOARD), 0, told[:-2], board))
    told = f"{folder} has disappeared: "
    with chaos.before_step(3, lambda: shutil.rmtree(folder)):
        deleted = start(folder, NONE)
    yield row("the folder", NONE, "run has disappeared: ", wrong(deleted, 2, told, folder))
    for fault, told in FAULTS.items():
        yield row(fault.part, fault, told, wrong(start(folder, fault), 2, told, folder))
    told = "its file system has no locks (No locks available)"
    yield row(NO_LOCKS.part, NO_LOCKS, told, wrong(start(folder, NO_LOCKS), 0, told, folder))
    for other in (slow, board, folder):
        yield row(f"the end of {other.name}", NONE, "", ", ".join(chaos.differences(other, chaos.result(undisturbed))))


def main(results: str) -> int:
    """Write a row for each start, and return the number of starts that did not do what they have to."""
    chaos.prepare()
    place, found = Path(tempfile.mkdtemp(prefix="octet-faults-")), []
    for one in rows(place):
        print(f"{one['name']}, {one['fails']}: {one['wrong'] or 'ok'}", file=sys.stderr, flush=True)
        found.append(one)
    document = {"machine": machine.describe() | {"command": COMMAND}, "starts": found}
    Path(results).write_text(json.dumps(document, indent=1) + "\n")
    shutil.rmtree(place)
    return sum(bool(one["wrong"]) for one in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
