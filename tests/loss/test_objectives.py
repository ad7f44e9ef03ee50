"""Losses against a plain reference in float64, and by hand what test_trl_parity.py cannot compare."""

import math
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from tests.conftest import row
from trainer.advantage import ADVANTAGES
from trainer.batch.pack import AGGREGATIONS, to_tensors
from trainer.config.settings import Algorithm, Correction, Kl
from trainer.loss.objectives import ESTIMATORS, LOSSES, Coefficient, correction, mismatch, objective
from trainer.records import Scores

SETTINGS = Algorithm(clip_low=0.2, clip_high=0.3)


def test_every_choice_of_the_configuration_exists():
    for field, known in (("loss", LOSSES), ("advantage", ADVANTAGES), ("aggregation", AGGREGATIONS)):
        assert set(get_args(Algorithm.model_fields[field].annotation)) == set(known)
    assert set(get_args(Kl.model_fields["estimator"].annotation)) == set(ESTIMATORS)


def reference(name, logprobs, old, advantages, rewards, lengths):
    """Every loss of a few rows in plain Python, token by token."""
    low, high, losses = 0.8, 1.3, []
    for row_, before, advantage, reward, length in zip(logprobs, old, advantages, rewards, lengths, strict=True):
        whole = math.exp(sum(now - then for now, then in zip(row_[:length], before, strict=False)) / length)
        for now, then in zip(row_[:length], before, strict=False):
            ratio = whole if name == "gspo" else math.exp(now - then)
            kept = min(max(ratio, low), high)
            known = {"reinforce": -reward, "reinforce_baseline": -advantage, "cispo": -kept * advantage}
            losses.append(known[name] * now if name in known else -min(ratio * advantage, kept * advantage))
    return losses


@pytest.mark.parametrize("name", LOSSES)
def test_against_a_plain_reference_in_float64(name):
    torch.manual_seed(0)
    old = torch.randn(4, 5, dtype=torch.float64)
    logprobs = old + 0.4 * torch.randn(4, 5, dtype=torch.float64)
    advantages, rewards, lengths = [1.0, -1.0, 0.25, -2.0], [1.0, 0.0, 0.5, 2.0], [5, 3, 1, 4]
    mask = [[index < length for index in range(5)] for length in lengths]
    of_batch = {"old_logprobs_BT": old, "advantages_BT": torch.tensor(advantages)[:, None].double()}
    of_batch |= {"rewards_B": torch.tensor(rewards).double(), "mask_BT": torch.tensor(mask)}
    loss = LOSSES[name](logprobs, SimpleNamespace(**of_batch), SETTINGS)[of_batch["mask_BT"]]
    expected = reference(name, logprobs.tolist(), old.tolist(), advantages, rewards, lengths)
    torch.testing.assert_close(loss, torch.tensor(expected, dtype=torch.float64))


def test_the_mismatch_of_an_answer_is_a_geometric_mean():
    old, sampled = torch.zeros(1, 3), torch.tensor([[-math.log(4), 0.0, 7.0]])
    mask = torch.tensor([[True, True, False]])
    assert mismatch(old, sampled, mask, Correction(level="sequence")).tolist()[0] == pytest.approx([2.0, 2.0, 2.0])


def test_a_mask_leaves_out_what_is_above_the_cap():
    masked = Correction(level="token", mode="mask", cap=2.0)
    assert correction(torch.tensor([[0.5, 2.0, 4.0]]), masked).tolist() == [[0.5, 2.0, 0.0]]


def test_a_token_that_is_not_trained_keeps_its_entropy_bonus():
    """TRL leaves that out as well."""
    zeros, trained_BT = torch.zeros(1, 2), torch.tensor([[True, False]])
    batch = to_tensors([row(1, 2, advantage=2.0)], pad_token=0).measured(zeros, trained_BT)
    scores = Scores(zeros, torch.tensor([[0.2, 0.4]]))
    (losses,) = objective(scores, batch, Algorithm(entropy_bonus=0.5, correction={"level": "none"}), 0.0).tolist()
    assert losses == pytest.approx([-2 - 0.5 * 0.2, -0.5 * 0.4])


POLICY, REFERENCE = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()


def test_unbiased_and_k3_is_never_below_zero():
    """The expectation over the policy, token by token, is the true KL."""
    true = float((POLICY * (POLICY / REFERENCE).log()).sum())
    for name in ("k1", "k3"):
        assert float((POLICY * ESTIMATORS[name]((POLICY / REFERENCE).log())).sum()) == pytest.approx(true)
    assert (ESTIMATORS["k3"](torch.linspace(-5, 5, 101)) >= 0).all()


def gradient_of_mean(name: str) -> torch.Tensor:
    """Return the gradient by the logits, in expectation over samples of the policy."""
    logits = POLICY.log().requires_grad_()
    (POLICY * ESTIMATORS[name](torch.log_softmax(logits, -1) - REFERENCE.log())).sum().backward()
    return logits.grad


def test_the_gradient_of_k2_is_that_of_the_kl_and_that_of_k1_is_none():
    logits = POLICY.log().requires_grad_()
    policy = torch.softmax(logits, -1)
    (policy * (policy.log() - REFERENCE.log())).sum().backward()
    torch.testing.assert_close(gradient_of_mean("k2"), logits.grad)
    torch.testing.assert_close(gradient_of_mean("k1"), torch.zeros(3).double())
    torch.testing.assert_close(gradient_of_mean("k3"), POLICY - REFERENCE)  # of the KL from the reference


@pytest.mark.parametrize(("target", "measured", "factor"), [
    (0.1, 1.0, 1.02), (0.1, 0.0, 0.98), (0.1, 0.105, 1.005), (0.1, 0.1, 1.0), (None, 100.0, 1.0),
])  # fmt: skip
def test_a_steered_coefficient_follows_the_error_by_two_percent_at_most(target, measured, factor):
    coefficient, resumed = (Coefficient(Kl(coef=0.04, target=target)) for _ in range(2))
    coefficient.observe(measured)
    assert coefficient.value == pytest.approx(0.04 * factor)
    resumed.load(coefficient.state())
    assert resumed.value == coefficient.value
