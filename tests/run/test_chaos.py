"""Runs that are killed at random moments and resumed. `bash tests/chaos.sh 100` does the same for longer."""

import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.forks import forked


@pytest.mark.slow
def test_a_run_that_is_killed_ten_times_is_the_undisturbed_run():
    command = [*forked(), "-m", "tests.e2e.chaos", "10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "10 kills, 0 faults" in answer.stdout
