"""Numbers that are not finite, where they would come from in a run: they are skipped, and never trained on."""

import math
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import lines_of
from tests.samplers import Altered
from trainer import loop
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.errors import TrainingError
from trainer.run import assemble
from trainer.run.assemble import Run
from trainer.run_folder import lock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.steps=4", "run.save_every=9", "eval.problems=0", "run.merge=false", "run.threads=1"]
FEW += ["reward.weights={length: 1.0}", "reward.length_band=[1, 30]"]
NAN = float("nan")


@contextmanager
def built(folder: Path, *settings: str):
    run = assemble.build(Request(resolve("nano", None, [*FEW, *settings, f"run.dir={folder}/run"]), "nano", ""))
    try:
        yield run
    finally:
        run.log.close()
        run.rollouts.close()
        lock._release(run.log.folder)


def of_sampler(run: Run) -> Run:
    spoiled = Altered(run.rollouts.sampler, lambda one: replace(one, logprobs=(NAN,) * len(one.tokens)))
    return run._replace(rollouts=replace(run.rollouts, sampler=spoiled))


def of_gradient(number: float, times: int) -> Callable[[Run], Run]:
    """Spoil the gradient of one parameter in the first so many backward passes."""

    def spoil(run: Run) -> Run:
        left = iter(range(times))
        parameter = run.updater.policy.trainable[-1]
        parameter.register_hook(lambda gradient: gradient * number if next(left, None) is not None else gradient)
        return run

    return spoil


def of_loss(run: Run) -> Run:
    backward = run.updater.policy.backward
    run.updater.policy.backward = lambda loss: backward(loss * NAN)
    return run


def of_weights(run: Run) -> Run:
    with torch.no_grad():
        run.updater.policy.trainable[-1].fill_(NAN)
    return run


FAULTS = {  # -> what is spoiled, the error, the updates that are skipped
    "a gradient that is nan once": (of_gradient(NAN, 1), None, 1),
    "a gradient that is infinite once": (of_gradient(math.inf, 1), None, 1),
    "a gradient that stays nan": (of_gradient(NAN, 99), "3 times", 3),
    "a loss that is nan": (of_loss, "3 times", 3),
    "weights that are nan": (of_weights, "differ by nan", 1),
    "log-probs of the sampler that are nan": (of_sampler, "differ by nan", 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_not_finite_is_never_trained_on(name, tmp_path: Path, alone):
    spoil, message, skipped = FAULTS[name]
    with built(tmp_path) as run:
        with pytest.raises(TrainingError, match=message) if message else nullcontext():
            loop.train(run.log.config, *spoil(run))
        if name != "weights that are nan":
            assert all(parameter.isfinite().all() for parameter in run.updater.policy.trainable)
    assert len(list((tmp_path / "run").glob("bad_update_*.json"))) == skipped
    assert not message or not (tmp_path / "run/checkpoints").exists()


def test_equal_rewards_with_a_kl_are_not_divided_by_nothing(tmp_path: Path, alone):
    """Only the KL, which is small, tells the answers of a step apart."""
    kl = ["algorithm.advantage=batch_std", "algorithm.kl.coef=0.1", "algorithm.kl.where=reward"]
    with built(tmp_path, *kl, "algorithm.entropy_bonus=0.1") as run:
        loop.train(run.log.config, *run)
    spreads = [line["advantage/std"] for line in lines_of(tmp_path / "run/metrics.jsonl") if "advantage/std" in line]
    assert 0.5 < max(spreads) < 2
