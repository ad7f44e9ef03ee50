"""A few ranks of a program that a test has written, on this machine."""

from __future__ import annotations

import os
import subprocess

from tests.conftest import ROOT
from tests.forks import forked
from trainer.machine.hardware import free_port


def on_two_ranks(program: str, *arguments: str) -> list[str]:
    """Run code on two ranks and return the output of each."""
    return on_ranks(2, program, *arguments)


def on_ranks(count: int, program: str, *arguments: str) -> list[str]:
    """Run code on a number of ranks and return the output of each."""
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [*forked(), "-c", program, *arguments],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(count)
    ]
    try:
        return [rank.communicate(timeout=580)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
