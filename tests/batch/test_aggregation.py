"""Each way to make one number of the tokens of a step, against a reference that knows no weights."""

from statistics import fmean

import pytest
import torch

from trainer.batch.aggregation import AGGREGATIONS
from trainer.batch.pack import Packer, minibatches
from trainer.config.command_line import resolve
from trainer.loss.objectives import total
from trainer.records import TrainingRow

# Two groups; the losses of the tokens of each answer.
LOSSES = [[[1.0, 2.0], [4.0]], [[8.0, 16.0, 32.0], [64.0, 128.0]]]


def by_hand(aggregation: str, constant: float = 1.0) -> float:
    tokens = [loss for group in LOSSES for answer in group for loss in answer]
    if aggregation == "dapo":
        return fmean(tokens)
    if aggregation == "grpo":
        return fmean(fmean(answer) for group in LOSSES for answer in group)
    if aggregation == "bnpo":
        return fmean(fmean(loss for answer in group for loss in answer) for group in LOSSES)
    return sum(tokens) / constant


def config(aggregation: str):
    sizes = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_new_tokens=10"]
    return resolve("nano", None, [f"algorithm.aggregation={aggregation}", *sizes])


@pytest.mark.parametrize("budget", [1, 12, 1000])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_against_the_reference_for_any_micro_batches(aggregation, budget):
    """The losses of the tokens travel as log-probs, so that packing and padding sort them as it sorts rows."""
    rows = []
    for place, group in enumerate(LOSSES):
        weights = AGGREGATIONS[aggregation].weights_G([len(answer) for answer in group])
        for answer, weight in zip(group, weights, strict=True):
            rows.append(TrainingRow([5] * 3, [6] * len(answer), answer, 0.0, 0.0, weight, place=place))
    idle = TrainingRow([5], [6], [0.0], 0.0, weight=0.0)
    (minibatch,) = minibatches(rows, idle, config(aggregation), Packer(budget, 0))
    assert minibatch.tokens == 8
    found = sum(total(batch.sampled_logprobs_BT, batch, minibatch.divisor) for batch in minibatch.batches)
    expected = by_hand(aggregation, constant=2 * 2 * 10)  # problems x answers x the longest they could be
    assert float(found) == pytest.approx(expected, rel=1e-6)


def test_the_constant_divisor_knows_nothing_of_what_was_sampled():
    assert config("dr_grpo").constant_divisor == 40
    assert resolve("nano", None, ["algorithm.minibatches=4"]).constant_divisor == 16 * 8 * 40 / 4


def test_a_row_without_weight_counts_nothing():
    (batch,) = Packer(100, 0).pack([TrainingRow([5], [6, 7], [3.0, 4.0], 1.0, weight=0.0)])
    assert float(total(torch.ones(1, 2), batch, 1.0)) == 0.0
    assert not batch.counted_BT.any()
