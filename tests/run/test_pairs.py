"""Some of the runs in which features meet in pairs. `bash tests/pairs.sh RESULTS` makes them all."""

import os
import subprocess
from itertools import combinations

import pytest

from tests.conftest import ROOT
from tests.e2e.pairs import FEATURES, covering, pairs_of
from tests.forks import forked


@pytest.mark.slow
def test_every_two_values_meet_in_a_run_or_are_refused():
    runs, refused = covering(0)
    met = set().union(*map(pairs_of, runs))
    sizes = [len(names) for names in FEATURES.values()]
    assert len(met) + len(refused) == sum(one * other for one, other in combinations(sizes, 2))
    assert len(runs) < 100


@pytest.mark.slow
def test_runs_in_which_features_meet_are_refused_or_survive_a_kill(tmp_path):
    command = [*forked(), "-m", "tests.e2e.pairs", str(tmp_path / "pairs.json"), "0", "5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "'equal'" in answer.stdout
