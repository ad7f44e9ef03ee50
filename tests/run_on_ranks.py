"""A few ranks of a program on this machine."""

import os
import subprocess

from tests.conftest import ROOT
from tests.forks import forked
from trainer.machine.hardware import free_port


def on_two_ranks(program: str, *arguments: str) -> list[str]:
    return on_ranks(2, program, *arguments)


def on_ranks(count: int, program: str, *arguments: str) -> list[str]:
    """Run code on a number of ranks and return the output of each."""
    return [said for _, said in ended(count, "-c", program, *arguments)]


def start_ranks(count: int, *command: object) -> None:
    """Run a program, as `python` is told of it, on a number of ranks. All of them have to end well."""
    statuses = [status for status, _ in ended(count, *command)]
    assert statuses == [0] * count


def ended(count: int, *command: object) -> list[tuple[int, str]]:
    """Run a program on a number of ranks, and return the status and the output of each."""
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    start = {"args": [*forked(), *map(str, command)], "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    own = [os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    ranks = [subprocess.Popen(**start, env=of_rank) for of_rank in own]
    try:
        said = [rank.communicate(timeout=580)[0].strip() for rank in ranks]
        return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
