"""loss: pure functions of log-probs and advantages. Each gives a loss per token; the sum comes last, over the step.

The denominator is an argument: the tokens of the whole step, over all micro-batches and ranks. A mean of means would
weigh a token by the company it keeps, and can even flip the sign of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.config import Algorithm


class PolicyTerms(NamedTuple):
    """What a loss is made of. `old_logprobs_BT` is the policy at the start of the update, without gradient."""

    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    advantages_B: Tensor


def reinforce_baseline(terms: PolicyTerms, settings: Algorithm) -> Tensor:
    """-A log pi."""
    return -terms.advantages_B[:, None] * terms.logprobs_BT


def grpo_clip(terms: PolicyTerms, settings: Algorithm) -> Tensor:
    """-min(ratio A, clip(ratio) A), with ratio = pi / pi_old: the pessimistic one of the two."""
    ratio_BT = (terms.logprobs_BT - terms.old_logprobs_BT).exp()
    clipped_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    advantages_B1 = terms.advantages_B[:, None]
    return -torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)


LOSSES: dict[str, Callable[[PolicyTerms, Algorithm], Tensor]] = {
    "grpo_clip": grpo_clip,
    "reinforce_baseline": reinforce_baseline,
}


def total(loss_BT: Tensor, mask_BT: Tensor, denominator: float) -> Tensor:
    """The share of this micro-batch in the loss of the step: the sum over its completion tokens / all tokens."""
    return (loss_BT * mask_BT).sum() / denominator
