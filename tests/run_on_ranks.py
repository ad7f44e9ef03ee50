"""A few ranks of a program on this machine."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conftest import ROOT
from tests.forks import forked
from trainer.machine.hardware import free_port


def on_ranks(count: int, program: str, *arguments: str) -> list[str]:
    """Run code on a number of ranks and return the output of each."""
    return [rank.stdout.strip() for rank in ended(count, "-c", program, *arguments)]


def start_ranks(count: int, *command: object) -> None:
    """Run a program, as `python` is told of it, on a number of ranks. All of them have to end well."""
    for rank in ended(count, *command):
        assert rank.returncode == 0, rank.stderr


def ended(count: int, *command: object, folder: Path = ROOT) -> list[subprocess.CompletedProcess[str]]:
    """Run a program on a number of ranks, and return how each has ended. They meet in a folder of their own, because
    nothing listens at their port, so that other ranks may have been given the same one."""
    with tempfile.TemporaryDirectory() as meeting:
        ranks = started(count, *command, folder=folder, OCTET_RANKS=meeting)
        try:
            said = [rank.communicate(timeout=999) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    sys.stderr.write("".join(complained for _, complained in said))  # pytest shows it if a test fails
    return [subprocess.CompletedProcess(rank.args, rank.returncode, *text) for rank, text in zip(ranks, said)]


def started(count: int, *command: object, folder: Path = ROOT, **own: str) -> list[subprocess.Popen[str]]:
    """Start a program on a number of ranks, with these variables. One rank is a process that knows of no group."""
    around = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    around |= {"PYTHONPATH": str(ROOT)} | own
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)] if count > 1 else [{}]
    if count > 1:
        around |= {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    words = [*forked(), *map(str, command)]
    return [subprocess.Popen(words, cwd=folder, env=around | number, **pipes) for number in numbers]
