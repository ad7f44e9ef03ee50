"""Does every loss learn, and does it learn from the advantages? Minutes, so in the slow tier.

Twelve steps of the embedded model, one seed unless OCTET_SEEDS names several, two runs at a time. What rises is the
mean reward of the sampled answers, from the first three steps to the last three: about 380 answers on either side, so
luck is worth 0.05.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import pytest

from tests.conftest import ROOT, launch, lines_of
from tests.forks import forked
from trainer.loss.objectives import LOSSES

pytestmark = pytest.mark.slow

SEEDS = tuple(map(int, os.environ.get("OCTET_SEEDS", "0").split(",")))  # OCTET_SEEDS=0,1,2 is thorough
EDGE = 3  # steps at the beginning and at the end that are compared
LEARNED, DRIFTED = 0.2, 0.15
COMMON = ["run.steps=12", "optim.schedule=constant", "eval.problems=0", "run.merge=false", "run.save_every=1000"]
# With one update a step the ratio is 1, and all but `reinforce` are the same loss.
COMMON += ["algorithm.minibatches=2"]
SETTINGS = {
    "reinforce": [],
    "reinforce_baseline": [],
    "grpo_clip": [],
    "gspo": ["algorithm.aggregation=grpo", "algorithm.clip_low=3e-3", "algorithm.clip_high=4e-3"],
    "cispo": ["algorithm.clip_low=1", "algorithm.clip_high=4"],
}


class Job(NamedTuple):
    loss: str
    seed: int
    control: str = "none"


SHUFFLED = [Job("grpo_clip", seed, "shuffled_advantages") for seed in SEEDS]
JOBS = [Job(loss, seed) for loss in SETTINGS for seed in SEEDS] + SHUFFLED


def gain(job: Job, folder: Path) -> float:
    """Return by how much the mean reward of an answer rose."""
    settings = [f"algorithm.loss={job.loss}", f"run.seed={job.seed}", f"reward.control={job.control}"]
    settings += [f"run.dir={folder}", *SETTINGS[job.loss]]
    launch(*forked(), ROOT / "train.py", "--preset", "nano", *COMMON, *settings, check=True, timeout=590)
    rewards = [line["reward/mean"] for line in lines_of(folder / "metrics.jsonl")]
    assert len(rewards) == 12
    return fmean(rewards[-EDGE:]) - fmean(rewards[:EDGE])


@pytest.fixture(scope="module")
def gains(tmp_path_factory) -> dict[Job, float]:
    folder = tmp_path_factory.mktemp("learning")
    forked()  # starts the server, before there are threads
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(JOBS, pool.map(lambda job: gain(job, folder / str(JOBS.index(job))), JOBS)))
    for job, value in found.items():
        print(f"{job.control:20} {job.loss:20} seed {job.seed}  {value:+.3f}")
    return found


@pytest.mark.parametrize("loss", LOSSES)
def test_the_reward_rises_with_every_loss_and_seed(gains, loss):
    """It rose by 0.32 or more, and by 0.46 on average, when the bound was set."""
    rose = {seed: gains[Job(loss, seed)] for seed in SEEDS}
    assert min(rose.values()) > LEARNED, rose


def test_it_does_not_with_shuffled_advantages(gains):
    """Noise moves it, too, one way or the other (by 0.1 in a usual run), but not upwards in all of them."""
    drifted = [gains[job] for job in SHUFFLED]
    assert fmean(drifted) < DRIFTED, drifted
