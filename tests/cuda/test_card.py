"""bench/card.sh, end to end: its parts run, and a second call goes on where the first stopped."""

import json
import os
import sys
from pathlib import Path

from tests.conftest import ran


def card(folder: Path, minutes: int) -> str:
    environment = os.environ | {"OCTET_PYTHON": sys.executable, "OCTET_CARDS": str(folder), "OCTET_CARD_TRIAL": "1"}
    environment |= {"OCTET_CARD_MINUTES": str(minutes), "CUDA_STUB_COMPUTE_BYTES": "300000", "DS_ACCELERATOR": "cuda"}
    done = ran("bash", "bench/card.sh", env=environment, timeout=580)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_parts_run_once_and_make_one_file(tmp_path):
    assert "no time for doctor" in card(tmp_path, minutes=0)
    assert "octet: decode" in card(tmp_path, minutes=9)
    result = json.loads((tmp_path / "CUDA-stub-8.6.json").read_text())
    statuses = {name: part["status"] for name, part in result["parts"].items()}
    assert statuses == {"decode": 0, "doctor": 0, "rehearsal": 0, "tests": 0}, result
    assert result["parts"]["decode"]["result"]["speedup"]
    assert result["parts"]["rehearsal"]["result"]["allocated"]
    again = card(tmp_path, minutes=9)
    assert "octet: decode" not in again
    assert "is written" in again
