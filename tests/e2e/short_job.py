"""A job of two steps, as the launcher starts it, on one or two ranks."""

import os
import shutil
import subprocess
from typing import Any

from tests.conftest import ROOT, learned, ran
from tests.forks import forked
from tests.run_on_ranks import ended
from trainer.machine import disk

ADAPTER = "adapter/adapter_model.safetensors"
FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.steps=2", "run.save_every=1", "algorithm.loss=reinforce", "reward.weights={length: 1.0}"]
FEW += ["reward.length_band=[1, 30]", "task.limit=64"]


def train(folder, *arguments: str, ranks: int = 1) -> str:
    """Start the ranks as the launcher does, and return the output of rank 0."""
    found = ended(ranks, ROOT / "train.py", *arguments, folder=folder)
    assert [(one.returncode, one.stderr) for one in found] == [(0, "")] * ranks
    return found[0].stdout


def octet(folder, *arguments: object, columns: int = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, and return how it has ended."""
    around = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": str(columns)}
    command = [*forked(), "-m", "trainer.commands.main", *arguments]
    return ran(*command, cwd=folder, env=around, timeout=999, **options)


def resumes_to_the_bit(whole, train=train, steps: int = 2) -> None:
    """Cut off the last step in a copy of a run, take it again, and compare metrics, answers and weights."""
    cut = shutil.copytree(whole, whole.parent / "again/it", symlinks=True)
    disk.mark_as_made_here(cut)  # a copy may be of somebody else's run, whose code does not run
    (product,) = (name for name in ("adapter", "model") if (whole / name).exists())
    shutil.rmtree(cut / product)
    shutil.rmtree(cut / f"checkpoints/step_{steps:06d}")
    (cut / "checkpoints/latest").unlink()
    assert f"continuing after step {steps - 1}" in train(cut.parent, "--resume", "it")
    assert learned(cut) == learned(whole)
    for path in [*whole.glob("samples.jsonl"), *whole.glob(f"{product}/*.safetensors")]:
        assert (cut / path.relative_to(whole)).read_bytes() == path.read_bytes(), path
