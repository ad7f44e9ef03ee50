"""What Slurm says about this process and its job. Without Slurm everything here says nothing. Imports no torch."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from trainer.errors import ClusterError, Interrupted

PORTS = range(10_000, 30_000)  # below those that systems hand out by themselves
ASK_S = 30.0  # what a question to Slurm may take


@dataclass
class StopSignal:
    """What this process knows about the signal that tells it to save and stop, SIGUSR1."""

    has_arrived: bool = False
    interrupts_with: str = ""  # message of the error that it raises at once; empty while it waits for the step to end


_stop = StopSignal()


def adopt_ranks() -> None:
    """Under plain srun: the names that torchrun uses, so that the rest of the program knows only these. deepspeed has
    another one for the ranks of this node."""
    if "RANK" in os.environ and "LOCAL_SIZE" in os.environ:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    if "RANK" in os.environ or not is_one_of_several():
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
    if each := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        os.environ["LOCAL_WORLD_SIZE"] = str(tasks_of(each)[int(os.environ["SLURM_NODEID"])])
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = nodes()[0]
    os.environ.setdefault("MASTER_PORT", str(port()))


def is_step() -> bool:
    """srun started this, and not the shell of a batch script."""
    return "SLURM_STEP_ID" in os.environ


def is_one_of_several() -> bool:
    """srun started other tasks beside this one."""
    return is_step() and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def tasks_of(each: str) -> list[int]:
    """`4(x2),3` is 4, 4 and 3: the tasks of each node of a step."""
    found = []
    for part in each.split(","):
        tasks, _, times = part.partition("(x")
        found += [int(tasks)] * int(times.rstrip(")") or 1)
    return found


def nodes() -> list[str]:
    """The nodes of this step, in the order of their ranks; empty outside of one."""
    listed = os.environ.get("SLURM_STEP_NODELIST")
    if not is_step() or not listed:
        return []
    try:
        answer = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"SLURM_STEP_NODELIST={listed}: `scontrol show hostnames` cannot be asked for the nodes ({error}). "
            "Before srun, write export MASTER_ADDR=$(scontrol show hostnames | head -n 1)."
        ) from None
    return answer.stdout.split()


def port() -> int:
    """From the job and its step, so that every rank finds the same one and two jobs on a node have different ones."""
    number = 7 * int(os.environ.get("SLURM_JOB_ID", "0")) + int(os.environ.get("SLURM_STEP_ID", "0"))
    return PORTS[number % len(PORTS)]


def say_that_it_failed(what: str) -> None:
    """To the job script, by the file that OCTET_FAILED names. The status of the job may not say it: on GPUs the others
    wait in a collective for a rank that has ended, until srun or NCCL ends them with a status of its own."""
    if named := os.environ.get("OCTET_FAILED"):
        with suppress(OSError):
            Path(named).parent.mkdir(parents=True, exist_ok=True)
            Path(named).write_text(what + "\n")


def restarts() -> int:
    """How often Slurm has started this job again."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def job_number() -> str:
    """Empty outside of a job. A task of an array is asked for by both of its numbers: the last one has that of all."""
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def describe() -> str:
    """The job in a few words; nothing outside of one."""
    if not (job := job_number()):
        return ""
    where = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    return f"Slurm job {job} on {where}, restart {restarts()} (SLURM_RESTART_COUNT)"


def seconds_left() -> float | None:
    """Until the time limit of the job; None where there is no job, no limit, or nobody to ask."""
    if end := os.environ.get("SLURM_JOB_END_TIME"):  # since Slurm 23.02
        return float(end) - time.time()
    job = job_number()
    if not job or shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError):  # a busy controller answers late: no reason to end a run
        return None
    return seconds_of(answer.stdout.strip())


def seconds_of(text: str) -> float | None:
    """`1-02:03:04`, `2:03:04` or `3:04` in seconds; None for `UNLIMITED` and its like."""
    days, dash, clock = text.rpartition("-")
    parts = clock.split(":")
    if len(parts) < 2 or not all(part.isdigit() for part in parts):
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return float(86_400 * int(days) + seconds) if dash else float(seconds)


def listen() -> None:
    """For the signal that `#SBATCH --signal=USR1@120` sends some time before the end; see ranks/stopping.py. One that
    came before is let through now, where the launcher has held it back."""
    signal.signal(signal.SIGUSR1, _on_stop_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def stop_is_requested() -> bool:
    return _stop.has_arrived


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Let the signal raise Interrupted in the middle of a block whose work can be done again by the next start."""
    _stop.interrupts_with = message
    try:
        _interrupt_if_requested()
        yield
    finally:
        _stop.interrupts_with = ""


def _on_stop_signal(number: int, frame: FrameType | None) -> None:
    _stop.has_arrived = True
    _interrupt_if_requested()


def _interrupt_if_requested() -> None:
    if _stop.has_arrived and _stop.interrupts_with:
        message, _stop.interrupts_with = _stop.interrupts_with, ""  # once: a second signal must not break the clean-up
        raise Interrupted(message)
