"""What only a CUDA device shows: bf16 and fp16 through the engine, with and without pinned offload."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no CUDA device here"),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("ds_config", ["zero2_offload", "zero2"])
def test_the_embedded_model_trains_on_the_card(tmp_path, dtype, ds_config):
    settings = [f"model.dtype={dtype}", f"engine.ds_config={ds_config}", "run.steps=20", "eval.problems=128"]
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "nano", *settings, "run.dir=it"]
    answer = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    assert "on 1 x cuda" in answer.stdout
    base, trained, _ = (one["accuracy"] for one in json.loads((tmp_path / "it/eval.json").read_text())["evaluations"])
    assert trained > base + 0.1
    metrics = [json.loads(line) for line in (tmp_path / "it/metrics.jsonl").read_text().splitlines()]
    assert all(record["sampler_difference"] < 0.05 for record in metrics if "sampler_difference" in record)
