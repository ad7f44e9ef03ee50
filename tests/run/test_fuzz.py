"""Broken input of every kind that Octet reads. `bash tests/fuzz.sh 100000` does the same for longer."""

import os
import subprocess

import pytest

from tests.conftest import ROOT
from tests.forks import forked


@pytest.mark.slow
def test_broken_input_is_used_or_refused_by_a_short_message():
    command = [*forked(), "-m", "tests.e2e.fuzz", "3000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "3000 inputs of 16 kinds, 0 faults" in answer.stdout
