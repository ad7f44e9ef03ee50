"""Runs on file systems that fail, in tests/e2e/faults.py."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from scripts import make_reliability_page
from tests.conftest import ROOT


@pytest.mark.slow
def test_every_writer_names_its_fault_and_the_same_command_ends_as_the_undisturbed_run(tmp_path):
    if not shutil.which("gcc"):
        pytest.skip("there is no gcc, which makes the library whose file operations fail")
    library, results = tmp_path / "faults.so", tmp_path / "results.json"
    source = ROOT / "tests/e2e/faults.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.e2e.faults", str(results)]
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert {one["wrong"] for one in json.loads(results.read_text())["starts"]} == {""}


def test_the_page_is_made_from_the_results():
    page = "python -m scripts.make_reliability_page > bench/results/reliability.md"
    assert (ROOT / "bench/results/reliability.md").read_text() == make_reliability_page.page(), page
    assert not [one for one in json.loads(make_reliability_page.FAULTS.read_text())["starts"] if one["wrong"]]
