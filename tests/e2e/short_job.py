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
FEW += ["reward.length_band=[1, 30]"]


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


def do_the_last_step_again(folder, ranks: int = 1) -> str:
    """Leave a run as a crash in the second of two steps does."""
    (folder / "checkpoints/latest").unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints/step_000002")
    return train(folder.parent, "--resume", str(folder), "run.merge=false", "eval.problems=0", ranks=ranks)


def resumes_to_the_bit(whole, train=train) -> None:
    """Cut off the second of two steps in a copy of a run, take it again, and compare metrics, answers and adapters."""
    cut = shutil.copytree(whole, whole.parent / "again/it", symlinks=True)
    disk.mark_as_made_here(cut)  # a copy may be of somebody else's run, whose code does not run
    shutil.rmtree(cut / "adapter")
    shutil.rmtree(cut / "checkpoints/step_000002")
    (cut / "checkpoints/latest").unlink()
    assert "continuing after step 1" in train(cut.parent, "--resume", "it")
    assert learned(cut) == learned(whole)
    for name in ("samples.jsonl", ADAPTER):
        assert (cut / name).read_bytes() == (whole / name).read_bytes(), name
