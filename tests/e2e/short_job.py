"""A job of two steps, as the launcher starts it, on one or two ranks."""

import os
import shutil
import subprocess

from tests.conftest import ROOT, learned
from tests.forks import forked
from trainer.machine import disk, hardware

ADAPTER = "adapter/adapter_model.safetensors"
FEW = ["rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.steps=2", "run.save_every=1", "algorithm.loss=reinforce", "reward.weights={length: 1.0}"]
FEW += ["reward.length_band=[1, 30]"]


def train(folder, *arguments: str, ranks: int = 1) -> str:
    """Start the ranks as the launcher does, and return the output of rank 0."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    if ranks > 1:
        own |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(hardware.free_port())}
    command = [*forked(), str(ROOT / "train.py"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    numbers = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(ranks)]
    started = [subprocess.Popen(command, cwd=folder, env=own | number, **pipes) for number in numbers]
    said = [process.communicate(timeout=999) for process in started]
    assert [(process.returncode, complained) for process, (_, complained) in zip(started, said)] == [(0, "")] * ranks
    return said[0][0]


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
