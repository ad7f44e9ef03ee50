"""A part of what two programs try at random: kills and broken input.

`bash tests/chaos.sh 100` and `bash tests/fuzz.sh 100000` do the same for longer.
"""

import pytest

from tests.conftest import launch
from tests.forks import forked

PROGRAMS = {"chaos": ("10", "10 kills, 0 faults"), "fuzz": ("3000", "3000 inputs of 16 kinds, 0 faults")}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_survives(program):
    count, said = PROGRAMS[program]
    assert said in launch(*forked(), "-m", f"tests.e2e.{program}", count, check=True, timeout=3600).stdout
