"""Features that meet in pairs: five of the runs of `bash tests/pairs.sh RESULTS`, all of which have every pair."""

import re
from itertools import combinations

import pytest

from tests.conftest import launch
from tests.e2e.pairs import FEATURES
from tests.forks import forked

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    results = tmp_path_factory.mktemp("pairs") / "results.json"
    return launch(*forked(), "-m", "tests.e2e.pairs", results, "0", "5", check=True, timeout=3600).stdout


def test_runs_survive(said):
    assert "'equal'" in said


def test_every_two_values_meet_in_a_run_or_are_refused(said):
    runs, met, refused = map(int, re.search(r"(\d+) runs have (\d+) pairs, (\d+) are refused", said).groups())
    sizes = [len(names) for names in FEATURES.values()]
    assert met + refused == sum(one * other for one, other in combinations(sizes, 2))
    assert runs < 100
