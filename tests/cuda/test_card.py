"""bench/card.sh, end to end: its parts run, and a second call goes on where the first stopped."""

import json
import os
import sys
from pathlib import Path

from tests.conftest import ran

STUDY = """
preset: nano
settings: {run.steps: 1, rollout.problems: 2, rollout.group_size: 2, rollout.max_new_tokens: 8, eval.problems: 2}
seeds: 1
arms: {right: {}}
"""


def card(folder: Path, minutes: int, *options: str, **changed: str) -> str:
    environment = os.environ | {"OCTET_PYTHON": sys.executable, "OCTET_CARDS": str(folder)}
    environment |= {"OCTET_CARD_MINUTES": str(minutes), "CUDA_STUB_COMPUTE_BYTES": "300000", "DS_ACCELERATOR": "cuda"}
    return ran("bash", "bench/card.sh", *options, env=environment | changed, check=True, timeout=3600).stdout


def test_the_parts_run_once_and_make_one_file(tmp_path):
    study = tmp_path / "trial.yaml"
    study.write_text(STUDY)
    trial = {"OCTET_CARD_TRIAL": str(study)}
    assert "no time for doctor" in card(tmp_path, 0, **trial)
    assert "octet: decode" in card(tmp_path, 60, **trial)
    result = json.loads((tmp_path / "CUDA-stub-8.6.json").read_text())
    statuses = {name: part["status"] for name, part in result["parts"].items()}
    expected = dict.fromkeys(("decode", "doctor", "gsm8k", "rehearsal", "tests", "warmup"), 0)
    assert statuses == expected, result
    assert result["parts"]["decode"]["result"]["speedup"]
    assert result["parts"]["rehearsal"]["result"]["allocated"]
    assert result["parts"]["gsm8k"]["result"]["arms"]["right"]["strict"]
    assert [*result["parts"]["gsm8k"]["curves"]["right-0"]] == ["0", "1"]
    again = card(tmp_path, 60, **trial)
    assert "octet: decode" not in again
    assert "is written" in again


def test_what_would_run_is_printed_and_a_small_card_begins_with_its_preset(tmp_path):
    said = card(tmp_path, 30, "--dry-run").splitlines()
    assert [line.partition(",")[0] for line in said[1:5]] == ["doctor", "learning", "tests", "8gb"]
    large = [line.partition(",")[0] for line in card(tmp_path, 30, "--dry-run", CUDA_STUB_MEMORY_GIB="80").splitlines()]
    assert large[4:8] == ["equations", "warmup", "gsm8k", "decode-same"]
    assert [*tmp_path.iterdir()] == []
