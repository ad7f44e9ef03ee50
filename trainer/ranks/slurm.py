"""This process and its job as Slurm describes them. Without Slurm the functions return empty values. No torch here."""

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from trainer.errors import ClusterError
from trainer.machine.safe_text import visible, without_keys

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")  # torchrun's variables
FOLDER = "OCTET_RANKS"  # variable with the launcher's folder for the store of the ranks on one machine
PORTS = range(10_000, 30_000)  # below the ephemeral ports of Linux
TIMEOUT_S = 30.0  # for a command of Slurm


def adopt_ranks() -> None:
    """Set the variables of torchrun from those of srun or mpirun, so that the rest of the program reads only these.
    DeepSpeed's launcher sets them, too, except LOCAL_WORLD_SIZE, which it names LOCAL_SIZE."""
    if "RANK" in os.environ and "LOCAL_SIZE" in os.environ:
        os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["LOCAL_SIZE"])
    elif "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(PORTS[os.getppid() % len(PORTS)]))  # mpirun is the parent of all ranks
        for name in NAMES:
            os.environ[name] = str(_number(f"OMPI_COMM_WORLD_{name.replace('WORLD_', '')}"))
    must_be_numbers()
    if "RANK" in os.environ or not is_one_of_several():
        return
    os.environ["RANK"] = str(_number("SLURM_PROCID"))
    os.environ["LOCAL_RANK"] = str(_number("SLURM_LOCALID"))
    os.environ["WORLD_SIZE"] = str(_number("SLURM_STEP_NUM_TASKS"))
    if each := os.environ.get("SLURM_STEP_TASKS_PER_NODE"):
        tasks, node = tasks_of(each), _number("SLURM_NODEID")
        if node >= len(tasks):
            raise _unreadable("SLURM_NODEID")
        os.environ["LOCAL_WORLD_SIZE"] = str(tasks[node])
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = nodes()[0]
    os.environ.setdefault("MASTER_PORT", str(port()))


def must_be_numbers() -> None:
    """Raise ClusterError if a variable of torchrun or mpirun is set to something else than a number."""
    for name in (*NAMES, "OMPI_COMM_WORLD_SIZE"):
        _number(name, "0")


def is_step() -> bool:
    """Return True if srun started this process, rather than the shell of a batch script."""
    return "SLURM_STEP_ID" in os.environ


def is_one_of_several() -> bool:
    """Return True if srun started several tasks."""
    return is_step() and _number("SLURM_STEP_NUM_TASKS", "1") > 1


def tasks_of(each: str) -> list[int]:
    """Return the number of tasks on each node of a step: `4(x2),3` is [4, 4, 3]."""
    tasks = []
    for part in each.split(","):
        counts = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if not counts:
            raise _unreadable("SLURM_STEP_TASKS_PER_NODE")
        tasks += [int(counts[1])] * int(counts[2] or 1)
    return tasks


def _number(name: str, default: str = "") -> int:
    text = os.environ.get(name, default)
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise _unreadable(name)
    return int(text)


def _unreadable(name: str) -> ClusterError:
    if name not in os.environ:
        return ClusterError(name, "the launcher has not set it", "Export it for each rank, or start with torchrun")
    return ClusterError(f"{name}={visible(os.environ[name])[:100]}", "no launcher writes such a value", "Unset it")


def nodes() -> list[str]:
    """Return the nodes of this step in the order of their ranks, or [] outside a step."""
    if not (listed := os.environ.get("SLURM_STEP_NODELIST")):
        return []
    command = ["scontrol", "show", "hostnames", listed]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        reason = f"`scontrol show hostnames` cannot list the nodes ({visible(str(error))[:200]})"
        remedy = "Before srun, write export MASTER_ADDR=$(scontrol show hostnames | head -n 1)"
        raise ClusterError(f"SLURM_STEP_NODELIST={visible(listed)[:200]}", reason, remedy) from None
    return answer.stdout.split()


def port() -> int:
    """Return a port that is the same for all ranks of a step, and differs between steps and jobs."""
    number = 7 * _number("SLURM_JOB_ID", "0") + _number("SLURM_STEP_ID", "0")
    return PORTS[number % len(PORTS)]


def report_failure(message: str) -> None:
    """Write to the file OCTET_FAILED, which the job script reads. The exit status of the job may hide a failure: on
    GPUs the other ranks wait in a collective until srun or NCCL ends them with a different status."""
    if name := os.environ.get("OCTET_FAILED"):
        with suppress(OSError):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(without_keys(message) + "\n")


def restarts() -> int:
    """Return the number of times that Slurm has requeued this job."""
    return _number("SLURM_RESTART_COUNT", "0")


def job_number() -> str:
    """Return the job ID, `ARRAY_TASK` for a task of an array, or "" outside a job."""
    if task := os.environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{os.environ.get('SLURM_ARRAY_JOB_ID', '')}_{task}"
    return os.environ.get("SLURM_JOB_ID", "")


def describe() -> str:
    """Return a line about the job for the log, or "" outside a job."""
    if not (job := job_number()):
        return ""
    where = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    return visible(f"Slurm job {job} on {where}"[:200]) + f", restart {restarts()} (SLURM_RESTART_COUNT)"


def seconds_left() -> float | None:
    """Return the time until the job's limit, or None if there is no job, no limit or no answer from Slurm."""
    if os.environ.get("SLURM_JOB_END_TIME"):  # since Slurm 23.02
        return _number("SLURM_JOB_END_TIME") - time.time()
    job = job_number()
    if not job or shutil.which("squeue") is None:
        return None
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%L"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError):  # the controller may be busy, which must not end the run
        return None
    return seconds_of(answer.stdout.strip())


def seconds_of(text: str) -> float | None:
    """Convert `1-02:03:04`, `2:03:04` or `3:04` to seconds. Return None for `UNLIMITED`, `INVALID` and the like."""
    if not (parts := re.fullmatch(r"(?:(\d{1,6})-)?(?:(\d{1,6}):)?(\d{1,6}):(\d{1,6})", text)):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in parts.groups())
    return float(86_400 * days + 3600 * hours + 60 * minutes + seconds)
