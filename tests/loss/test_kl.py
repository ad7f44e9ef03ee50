"""The KL estimators against the true KL of two distributions, and a coefficient that steers."""

import pytest
import torch

from trainer.config.settings import Kl
from trainer.loss.objectives import ESTIMATORS, Coefficient

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
    difference = torch.log_softmax(logits, -1) - REFERENCE.log()
    (POLICY * ESTIMATORS[name](difference)).sum().backward()
    return logits.grad


def test_the_gradient_of_k2_is_that_of_the_kl_and_that_of_k1_is_none():
    logits = POLICY.log().requires_grad_()
    policy = torch.softmax(logits, -1)
    (policy * (policy.log() - REFERENCE.log())).sum().backward()
    torch.testing.assert_close(gradient_of_mean("k2"), logits.grad)
    torch.testing.assert_close(gradient_of_mean("k1"), torch.zeros(3).double())
    torch.testing.assert_close(gradient_of_mean("k3"), POLICY - REFERENCE)  # of the KL from the reference


@pytest.mark.parametrize(
    ("target", "measured", "factor"),
    [(0.1, 1.0, 1.02), (0.1, 0.0, 0.98), (0.1, 0.105, 1.005), (0.1, 0.1, 1.0), (None, 100.0, 1.0)],
)
def test_a_steered_coefficient_follows_the_error_by_two_percent_at_most(target, measured, factor):
    coefficient, resumed = (Coefficient(Kl(coef=0.04, target=target)) for _ in range(2))
    coefficient.observe(measured)
    assert coefficient.value == pytest.approx(0.04 * factor)
    resumed.load(coefficient.state())
    assert resumed.value == coefficient.value
