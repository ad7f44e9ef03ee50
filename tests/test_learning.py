"""Does it learn, and does it learn from the advantages? Minutes, so in the slow tier."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow


def accuracy_after(script: str, folder: Path, *settings: str) -> tuple[float, float]:
    """Greedy accuracy of the embedded model before and after 25 steps."""
    shared = ["run.steps=25", "eval.problems=256", "run.merge=false", "run.dir=it", "--preset", "nano"]
    subprocess.run([sys.executable, str(ROOT / script), *shared, *settings], cwd=folder, check=True, timeout=590)
    base, trained = (one["accuracy"] for one in json.loads((folder / "it/eval.json").read_text())["evaluations"])
    return base, trained


@pytest.mark.parametrize("loss", ["grpo_clip", "reinforce_baseline"])
def test_the_embedded_model_gets_better(tmp_path, loss):
    base, trained = accuracy_after("train.py", tmp_path, f"algorithm.loss={loss}")
    assert trained > base + 0.2


def test_it_does_not_with_shuffled_advantages(tmp_path):
    """Noise moves it, too, one way or the other, but not to where learning does (about 0.9)."""
    _, trained = accuracy_after("tests/learning/shuffled.py", tmp_path)
    assert trained < 0.7
