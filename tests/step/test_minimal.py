"""The real engine makes the update of examples/minimal.py, which is short enough to be checked by eye."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import minimal
from tests.conftest import NANO, WITH_ENGINE, group
from tests.e2e.updates import updater_of
from trainer import advantage
from trainer.batch import pack
from trainer.config.resolve import resolve
from trainer.step.engine import DeepSpeedPolicy
from trainer.watch.tally import Tally

pytestmark = WITH_ENGINE

SAME = ["lora.enabled=false", f"algorithm.lr={minimal.LEARNING_RATE}", "optim.weight_decay=0", "optim.warmup=0"]
SAME += ["optim.schedule=constant", "optim.max_grad_norm=1", "algorithm.correction.level=none"]
SAME += [f"rollout.temperature={minimal.TEMPERATURE}", f"algorithm.clip_high={minimal.CLIP}"]
SAME += ["optim.tokens_per_micro_batch=20"]
GROUPS = [
    group([1.0, 0.0, 0.0, 1.0], lengths=[3, 5, 2, 7], prompt=(5, 6, 7, 8)),
    group([1.0, 1.0], lengths=[2, 4], prompt=(9, 8)),
    group([0.0, 0.0, 1.0], lengths=[6, 1, 3], prompt=(30, 31, 32)),
]


def answers_of(scored) -> list[minimal.Answer]:
    values = minimal.advantages(scored.rewards_G)
    return [
        minimal.Answer([*scored.prompt.tokens], [*one.tokens], *numbers)
        for one, *numbers in zip(scored.completions, scored.rewards_G, values, strict=True)
    ]


def test_the_engine_makes_the_update_of_the_minimal_example():
    model = AutoModelForCausalLM.from_pretrained(NANO)
    trained, config = copy.deepcopy(model), resolve("nano", None, SAME)
    policy = DeepSpeedPolicy(trained, config, "fp32", total_steps=10)
    updater, algorithm, tally = updater_of(policy, config), config.algorithm, Tally()
    live = advantage.live_groups(GROUPS, config.drops_dead_groups)
    rows = pack.rows(live, [advantage.of(one.rewards_G, algorithm) for one in live], algorithm)
    minibatches = pack.minibatches(rows, pack.idle_row(GROUPS[0]), config, updater.packer)
    assert len(minibatches[0].batches) > 1, "several micro-batches are part of what is compared"
    (done,) = updater.update(updater.prepare(minibatches), 0, tally)

    optimizer = torch.optim.AdamW(model.parameters(), lr=minimal.LEARNING_RATE, weight_decay=0.0)
    answers = [answer for one in GROUPS if not one.is_dead for answer in answers_of(one)]
    before = [value.detach().clone() for value in model.parameters()]
    expected_loss = minimal.step(model, optimizer, minimal.pack(answers))

    assert tally.means(lambda sums: [sums])["loss"] == pytest.approx(expected_loss, abs=1e-6)
    assert not done.skipped
    for start, expected, found in zip(before, model.parameters(), trained.parameters(), strict=True):
        assert not torch.equal(expected, start)
        # a step of 1e-4 in each; Adam makes much of the rounding of a gradient that is nearly zero
        torch.testing.assert_close(found, expected, atol=3e-5, rtol=0)
        assert (found - expected).abs().mean() < 1e-6
