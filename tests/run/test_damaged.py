"""A run goes on after one of its files was damaged: equal, or said, or refused. tests/e2e/damaged.py has the table."""

import os
import random
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.e2e.damaged import CASES

SLICE = ["stopped/config.yaml/flipped", "stopped/metrics.jsonl/removed", "ended/best:adapter_model.safetensors/flipped"]


def go_on(cases: list[str]) -> None:
    command = [sys.executable, "-m", "tests.e2e.damaged", *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr[-3000:]


def test_some_damage_is_said_or_refused_or_has_no_effect():
    go_on(SLICE)


@pytest.mark.slow
def test_more_damage_is_said_or_refused_or_has_no_effect():
    """A part of the table; `python -m tests.e2e.damaged` tries it all."""
    go_on(random.Random(0).sample(CASES, 60))
