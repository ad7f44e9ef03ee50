"""A part of what four programs try at random: kills, broken input, features that meet in pairs, and damaged files; and
runs on file systems that fail.

`bash tests/chaos.sh 100`, `bash tests/fuzz.sh 100000`, `bash tests/pairs.sh RESULTS` and `python -m tests.e2e.damaged`
do the same for longer.
"""

import json
import random
import shutil
import sys
from itertools import combinations

import pytest

from scripts import make_reliability_page
from tests.conftest import ROOT, launch
from tests.e2e.damaged import CASES
from tests.e2e.pairs import FEATURES, covering, pairs_of
from tests.forks import forked

SOME = ["stopped/config.yaml/flipped", "stopped/metrics.jsonl/removed", "ended/best:adapter_model.safetensors/flipped"]
PROGRAMS = {
    "chaos": (["10"], "10 kills, 0 faults"),
    "damaged": ([*SOME, *random.Random(0).sample(CASES, 57)], "60 cases, 0 faults"),
    "fuzz": (["3000"], "3000 inputs of 16 kinds, 0 faults"),
    "pairs": (["{}/pairs.json", "0", "5"], "'equal'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_survives(program, tmp_path):
    own, said = PROGRAMS[program]
    command = ["-m", f"tests.e2e.{program}", *(one.format(tmp_path) for one in own)]
    assert said in launch(*forked(), *command, check=True, timeout=3600).stdout


@pytest.mark.slow
def test_every_two_values_meet_in_a_run_or_are_refused():
    runs, refused = covering(0)
    met = set().union(*map(pairs_of, runs))
    sizes = [len(names) for names in FEATURES.values()]
    assert len(met) + len(refused) == sum(one * other for one, other in combinations(sizes, 2))
    assert len(runs) < 100


@pytest.mark.slow
def test_every_writer_names_its_fault_and_the_same_command_ends_as_the_undisturbed_run(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc, which makes the library whose file operations fail")
    library, results = tmp_path / "faults.so", tmp_path / "results.json"
    launch("gcc", "-shared", "-fPIC", "-O1", "-o", library, ROOT / "tests/e2e/faults.c", "-ldl", check=True)
    launch(sys.executable, "-m", "tests.e2e.faults", results, check=True, timeout=1200, LD_PRELOAD=str(library))
    assert {one["wrong"] for one in json.loads(results.read_text())["starts"]} == {""}


def test_the_page_is_made_from_the_results():
    page = "python -m scripts.make_reliability_page > bench/results/reliability.md"
    assert (ROOT / "bench/results/reliability.md").read_text() == make_reliability_page.page(), page
    assert not [one for one in json.loads(make_reliability_page.FAULTS.read_text())["starts"] if one["wrong"]]
