"""A part of what three programs try at random: kills, broken input, and features that meet in pairs.

`bash tests/chaos.sh 100`, `bash tests/fuzz.sh 100000` and `bash tests/pairs.sh RESULTS` do the same for longer.
"""

import os
import subprocess
from itertools import combinations

import pytest

from tests.conftest import ROOT
from tests.e2e.pairs import FEATURES, covering, pairs_of
from tests.forks import forked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chaos", "10"], "10 kills, 0 faults"),
        (["fuzz", "3000"], "3000 inputs of 16 kinds, 0 faults"),
        (["pairs", "pairs.json", "0", "5"], "'equal'"),
    ],
    ids=["chaos", "fuzz", "pairs"],
)
def test_a_run_survives(arguments, said, tmp_path):
    program, *others = arguments
    own = [str(tmp_path / one) if one.endswith(".json") else one for one in others]
    command = [*forked(), "-m", f"tests.e2e.{program}", *own]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert said in answer.stdout


def test_every_two_values_meet_in_a_run_or_are_refused():
    runs, refused = covering(0)
    met = set().union(*map(pairs_of, runs))
    sizes = [len(names) for names in FEATURES.values()]
    assert len(met) + len(refused) == sum(one * other for one, other in combinations(sizes, 2))
    assert len(runs) < 100
