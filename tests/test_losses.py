"""Losses by hand arithmetic, against float64 references, and gradients by finite differences."""

import math
from typing import get_args

import pytest
import torch

from trainer.advantages import ADVANTAGES
from trainer.config import Algorithm
from trainer.losses import LOSSES, PolicyTerms, total

SETTINGS = Algorithm(clip_low=0.2, clip_high=0.3)


def terms(logprobs, old, advantages) -> PolicyTerms:
    return PolicyTerms(*(torch.tensor(part, dtype=torch.float64) for part in (logprobs, old, advantages)))


def test_every_choice_of_the_configuration_exists():
    assert set(get_args(Algorithm.model_fields["loss"].annotation)) == set(LOSSES)
    assert set(get_args(Algorithm.model_fields["advantage"].annotation)) == set(ADVANTAGES)


def test_reinforce_with_baseline_by_hand():
    # -2 * -0.5 = 1, -2 * -1 = 2; 0.5 * -3 = -1.5
    loss = LOSSES["reinforce_baseline"](terms([[-0.5, -1.0], [-3.0, 0.0]], [[0, 0], [0, 0]], [2.0, -0.5]), SETTINGS)
    assert loss.tolist() == [[1.0, 2.0], [-1.5, 0.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # on policy: -A
        (1.5, 1.0, -1.3),  # good answer, clipped at 1.3
        (0.5, 1.0, -0.5),  # good answer that became less likely: not clipped, the minimum is the pessimistic one
        (0.5, -1.0, 0.8),  # bad answer, clipped at 0.8
        (1.5, -1.0, 1.5),  # bad answer that became more likely: not clipped
    ],
)
def test_clipped_ratio_by_hand(ratio, advantage, expected):
    loss = LOSSES["grpo_clip"](terms([[math.log(ratio)]], [[0.0]], [advantage]), SETTINGS)
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(("ratio", "advantage"), [(1.5, 1.0), (0.5, -1.0)])
def test_the_clipped_side_has_no_gradient(ratio, advantage):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    LOSSES["grpo_clip"](PolicyTerms(logprobs, torch.zeros(1, 1), torch.tensor([advantage])), SETTINGS).sum().backward()
    assert logprobs.grad.tolist() == [[0.0]]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name):
    torch.manual_seed(0)
    old, advantages = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    logprobs = (old + 0.1 * torch.randn(3, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: LOSSES[name](PolicyTerms(x, old, advantages), SETTINGS), logprobs)


def test_on_policy_both_losses_have_one_gradient():
    gradients = []
    for loss in LOSSES.values():
        logprobs = torch.tensor([[-0.5, -2.0], [-1.0, -0.1]], requires_grad=True)
        loss(PolicyTerms(logprobs, logprobs.detach(), torch.tensor([1.0, -2.0])), SETTINGS).sum().backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_sum_is_over_masked_tokens_and_the_denominator_comes_from_outside():
    loss = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    mask = torch.tensor([[True, True, False], [False, False, True]])
    assert float(total(loss, mask, denominator=10)) == pytest.approx(3.5)  # (1 + 2 + 32) / 10


def test_one_step_in_pieces_has_the_same_loss():
    loss, mask = torch.randn(6, 5), torch.rand(6, 5) > 0.4
    whole = total(loss, mask, denominator=float(mask.sum()))
    pieces = sum(total(part, m, float(mask.sum())) for part, m in zip(loss.split(4), mask.split(4), strict=True))
    torch.testing.assert_close(whole, pieces)
