"""Runs whose files are damaged, and runs on file systems that fail. `python -m tests.e2e.damaged` tries all damages."""

import json
import random
import shutil
import sys

import pytest

from scripts import make_reliability_page
from tests.conftest import ROOT, launch
from tests.e2e.damaged import CASES
from tests.forks import forked

SOME = ["stopped/config.yaml/flipped", "stopped/metrics.jsonl/removed", "ended/best:adapter_model.safetensors/flipped"]


@pytest.mark.slow
def test_a_run_survives_damage():
    cases = [*SOME, *random.Random(0).sample(CASES, 57)]
    said = launch(*forked(), "-m", "tests.e2e.damaged", *cases, check=True, timeout=3600).stdout
    assert "60 cases, 0 faults" in said


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
