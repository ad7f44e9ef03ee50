"""Runs that are killed with `kill -9` at random moments: forks of this process, which has imported everything once.

python -m tests.e2e.chaos KILLS [SEED [RESULTS]]

Half of the moments are points in time, for what takes long. The others are file operations in the run folder, for what
is short and matters: a log line, a file of a checkpoint, a rename, a link, a deletion. RESULTS is a JSON file that gets
the number of kills and faults of each kind of run.
"""

import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

import train
from bench.machine import describe
from tests.conftest import learned
from trainer.machine import hardware, quiet
from trainer.machine.exits import answering_errors
from trainer.problem.word_problems import NanoTask
from trainer.run import job
from trainer.run_folder.run_log import RunLog

SETTINGS = ["--preset", "nano", "rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=24"]
SETTINGS += ["run.steps=5", "run.save_every=2", "eval.problems=8", "eval.every=3", "rollout.dead_groups=keep"]
SETTINGS += ["run.threads=1", "run.keep=2", "task.limit=64"]
SERVER = "tests.e2e.vllm_double"  # which outlives the runs
VLLM_PORT = hardware.free_port()
AHEAD = ["rollout.engine=vllm_server", f"rollout.vllm.urls=http://127.0.0.1:{VLLM_PORT}", "rollout.ahead=1"]
VARIANTS: dict[str, tuple[int, list[str]]] = {  # ranks, and further settings
    "one rank, merged at the end": (1, []),
    "two ranks": (2, ["run.merge=false"]),
    "whole model": (1, ["lora.enabled=false", "algorithm.kl.coef=0.01"]),
    "one step ahead, with a server": (1, [*AHEAD, "run.merge=false"]),
}
PATIENCE_S = 5.0  # for the ranks that are left when one is killed; DeepSpeed gives them 30
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, which can count them


class Moment(NamedTuple):
    """When a rank is killed: after so many seconds, or before one of its file operations in the run folder."""

    rank: int = 0
    seconds: float | None = None
    operation: int | None = None

    def __str__(self) -> str:
        when = f"after {self.seconds:.2f} s" if self.seconds is not None else f"at file operation {self.operation}"
        return f"rank {self.rank} {when}"


class Ended(NamedTuple):
    statuses: list[int]
    said: str
    seconds: float
    operations: int


def prepare() -> None:
    """Import what a start imports, and make its problems."""
    quiet.quiet()
    import_module("trainer.step.engine")  # with DeepSpeed, after `quiet`
    assert job.run
    NanoTask().train()


def start(folder: Path, ranks: int, settings: list[str], moment: Moment | None = None) -> Ended:
    """Start the ranks of a run, kill one at the moment, and wait until all have ended."""
    began, port = time.monotonic(), hardware.free_port()
    said = folder.with_name(f"{folder.name}.said")
    said.write_text("")
    children = [_fork(folder, rank, ranks, port, settings, moment) for rank in range(ranks)]
    if moment and moment.seconds is not None:
        threading.Timer(moment.seconds, _kill, [children[moment.rank]]).start()
    statuses = list(_wait(children))
    counted = folder.with_name(f"{folder.name}.operations")
    operations = int(counted.read_text()) if counted.is_file() else 0
    return Ended(statuses, said.read_text(), time.monotonic() - began, operations)


def _wait(children: list[int]) -> Iterator[int]:
    """Yield the exit statuses. When a rank is killed, end the others as a launcher does: TERM, and KILL later."""
    running = set(children)
    while running:
        child, status = os.waitpid(-1, 0)
        if child not in running:  # an orphan
            continue
        running.remove(child)
        if os.WIFSIGNALED(status):
            for other in running:
                os.kill(other, signal.SIGTERM)
                threading.Timer(PATIENCE_S, _kill, [other]).start()
        yield os.waitstatus_to_exitcode(status)


def _kill(process: int) -> None:
    if psutil.pid_exists(process) and psutil.Process(process).ppid() == os.getpid():
        os.kill(process, signal.SIGKILL)


def _fork(folder: Path, rank: int, ranks: int, port: int, settings: list[str], moment: Moment | None) -> int:
    if child := os.fork():
        return child
    for descriptor in (1, 2):
        os.dup2(os.open(folder.with_name(f"{folder.name}.said"), os.O_WRONLY | os.O_APPEND), descriptor)
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    last = moment.operation if moment and moment.rank == rank else None
    operations = _count_operations(folder, last)
    sys.argv = ["train.py", *SETTINGS, *settings, f"run.dir={folder}"]
    status = answering_errors(train.main)
    sys.stdout.flush()
    if rank == 0:
        folder.with_name(f"{folder.name}.operations").write_text(str(operations[0]))
    os._exit(status)


def _count_operations(folder: Path, last: int | None) -> list[int]:
    """Count the file operations in a folder, and end this process just before the last one."""
    operations = [0]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")) and str(folder) in str(arguments[:2]):
            if operations[0] == last:
                os.kill(os.getpid(), signal.SIGKILL)
            operations[0] += 1

    sys.addaudithook(count)
    return operations


@contextmanager
def before_step(number: int | None, act: Callable[[], object]) -> Iterator[None]:
    """Have the runs that are started meanwhile call a function before they log this step."""
    log_step = RunLog.step

    def step(log: RunLog, done: int, *rest: Any) -> None:
        if done == number:
            act()
        log_step(log, done, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLog, "step", step)
        yield


def result(folder: Path) -> dict[str, Any]:
    """Return everything that has to be equal, by the name of its file."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if name.endswith("metrics.jsonl"):
            found[name] = learned(path.parent)
        elif name.endswith((".safetensors", "samples.jsonl", "answers.jsonl", "best.json", "data.json")):
            found[name] = path.read_bytes()
        elif "tensorboard/" not in name:
            found[name] = ""
    return found


def differences(folder: Path, undisturbed: dict[str, Any]) -> list[str]:
    found = result(folder)
    return [name for name in sorted(found.keys() | undisturbed) if found.get(name) != undisturbed.get(name)]


def survivors() -> list[str]:
    """Return the processes that a run has left behind. A helper of a killed run first imports what it needs."""
    until = time.monotonic() + 60
    while (left := list(_other_children())) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _other_children() -> Iterator[str]:
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended; `_wait` collects what is left of it
            if SERVER not in (words := child.cmdline()):
                yield " ".join(words)


def killed_run(folder: Path, name: str, usual: Ended, rng: random.Random, kills: int) -> Iterator[tuple[str, str]]:
    """Kill a run up to so many times, let it end, and yield each moment with what went wrong."""
    ranks, settings = VARIANTS[name]
    for _ in range(kills):
        at = rng.random()
        in_time = rng.random() < 0.5
        place = {"seconds": at * usual.seconds} if in_time else {"operation": int(at * usual.operations)}
        moment = Moment(rng.randrange(ranks) if in_time else 0, **place)
        ended = start(folder, ranks, settings, moment)
        if -signal.SIGKILL not in ended.statuses:
            break  # it came to its end before the moment
        wrong = [f"processes are left: {left}"] if (left := survivors()) else []
        wrong += [f"traceback:\n{ended.said}"] if "Traceback" in ended.said else []
        yield str(moment), "; ".join(wrong)
    ended = start(folder, ranks, settings)
    yield "", "" if set(ended.statuses) == {0} and "Traceback" not in ended.said else f"it does not end:\n{ended.said}"


@contextmanager
def server_of_answers() -> Iterator[None]:
    """Run the double of a vLLM server for all runs."""
    command = [sys.executable, "-m", SERVER, str(VLLM_PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.kill()


def main(kills: int, seed: int = 0, results: Path | None = None) -> int:
    """Return the number of faults."""
    prepare()
    ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
    with server_of_answers():
        counted = kill_runs(kills, seed)
    faults = sum(row["faults"] for row in counted)
    print(f"{kills} kills, {faults} faults (seed {seed})")
    if results:
        facts = {"machine": describe() | {"command": f"bash tests/chaos.sh {kills} {seed}"}, "rows": counted}
        results.write_text(json.dumps(facts, indent=1) + "\n")
    return faults


def kill_runs(kills: int, seed: int) -> list[dict[str, Any]]:
    """Return the kills and the faults of each kind of run."""
    rng, done = random.Random(seed), 0
    killed, faults = Counter[str](), Counter[str]()
    place = Path(tempfile.mkdtemp(prefix="octet-chaos-"))
    usual, undisturbed = dict[str, Ended](), dict[str, dict[str, Any]]()
    for number, name in enumerate(cycle(VARIANTS)):
        if done == kills:
            break
        if name not in usual:
            folder = place / name.replace(" ", "-")
            usual[name] = start(folder, *VARIANTS[name])
            assert set(usual[name].statuses) == {0}, usual[name].said
            undisturbed[name] = result(folder)
        folder = place / f"run-{number:03d}"
        for moment, wrong in killed_run(folder, name, usual[name], rng, min(3, kills - done)):
            done += bool(moment)
            killed[name] += bool(moment)
            print(f"{folder.name} {name}: {f'killed, {moment}' if moment else 'resumed'}: {wrong or 'ok'}", flush=True)
            faults[name] += bool(wrong)
        if different := differences(folder, undisturbed[name]):
            faults[name] += 1
            print(f"{folder}: not the undisturbed run: {', '.join(different)}", flush=True)
    if not faults.total():
        shutil.rmtree(place)
    return [{"run": name, "kills": killed[name], "faults": faults[name]} for name in killed]


if __name__ == "__main__":
    sys.exit(bool(main(*map(int, sys.argv[1:3]), *map(Path, sys.argv[3:]))))
