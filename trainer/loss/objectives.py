"""loss: pure functions of log-probs and advantages. Each gives a loss per token; the sum comes last, over the step.

The divisor is an argument: it belongs to the whole step, over all micro-batches and ranks (`batch/aggregation.py`). A
mean of means would weigh a token by the company it keeps, and can even flip the sign of the gradient.

The KL says how far the policy has moved from a reference. It is estimated from the tokens that were sampled (Schulman
2020), and added to the loss here or taken off the rewards in `step/update.py`. With d = log pi - log pi_ref of a token:

    k1   d                   unbiased, can be negative; for the reward: in a loss its gradient is zero on average
    k2   d^2 / 2             its gradient is that of the true KL, on policy
    k3   exp(-d) + d - 1     unbiased, never negative, little noise; its gradient is that of the KL from pi_ref to pi
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.config.settings import Algorithm, Correction, Kl
from trainer.records import MeasuredBatch, Scores, TrainingBatch

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": lambda difference: (-difference).expm1() + difference,
}
# A loss of each token, of log-probs that have a gradient. Those of the batch are of the policy that answered.
Loss = Callable[[Tensor, MeasuredBatch, Algorithm], Tensor]


def reinforce(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -R log pi, with the raw reward."""
    return -batch.rewards_B[:, None] * logprobs_BT


def reinforce_baseline(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -A log pi."""
    return -batch.advantages_BT * logprobs_BT


def grpo_clip(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -min(ratio A, clip(ratio) A) for each token, with ratio = pi / pi_old."""
    return pessimistic((logprobs_BT - batch.old_logprobs_BT).exp(), batch.advantages_BT, settings)


def gspo(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return the same as `grpo_clip` with one ratio per answer, the geometric mean of the ratios of its tokens."""
    ratio_B1 = mean_over_row(logprobs_BT - batch.old_logprobs_BT, batch.mask_BT).exp()
    return pessimistic(ratio_B1, batch.advantages_BT, settings).expand_as(logprobs_BT)


def cispo(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -clip(ratio) A log pi. The clipped ratio is only a weight, so no token loses its gradient."""
    ratio_BT = (logprobs_BT - batch.old_logprobs_BT).exp().detach()
    weight_BT = ratio_BT.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return -weight_BT * batch.advantages_BT * logprobs_BT


LOSSES: dict[str, Loss] = {
    "reinforce": reinforce,
    "reinforce_baseline": reinforce_baseline,
    "grpo_clip": grpo_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def pessimistic(ratio: Tensor, advantages_BT: Tensor, settings: Algorithm) -> Tensor:
    """Return the larger of the clipped and the unclipped loss. Dual clip bounds the ratio from above; the first bound
    does that already for an answer with a positive advantage."""
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    bounded = ratio if settings.dual_clip is None else ratio.clamp(max=settings.dual_clip)
    return -torch.minimum(bounded * advantages_BT, clipped * advantages_BT)


def mean_over_row(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True)


def mismatch(old_BT: Tensor, sampled_BT: Tensor, mask_BT: Tensor, settings: Correction) -> Tensor:
    """Return the probability under the policy that answered, divided by that under the sampler. The two differ by the
    rounding of two programs, or by an update if the answers were sampled ahead."""
    apart_BT = old_BT - sampled_BT
    if settings.level == "sequence":
        return mean_over_row(apart_BT, mask_BT).exp().expand_as(apart_BT)
    return apart_BT.exp()


def correction(ratio_BT: Tensor, settings: Correction) -> Tensor:
    """Return the ratio as a weight: truncated at the cap, or 0 above it."""
    if settings.level == "none":
        return torch.ones_like(ratio_BT)
    if settings.mode == "mask":
        return ratio_BT.where(ratio_BT <= settings.cap, 0.0)
    return ratio_BT.clamp(max=settings.cap)


def objective(scores: Scores, batch: MeasuredBatch, settings: Algorithm, kl_coef: float) -> Tensor:
    """Return the loss of each token: the chosen objective, corrected for the sampler, plus KL and entropy terms."""
    ratio_BT = mismatch(batch.old_logprobs_BT, batch.sampled_logprobs_BT, batch.mask_BT, settings.correction)
    loss_BT = LOSSES[settings.loss](scores.logprobs_BT, batch, settings) * correction(ratio_BT, settings.correction)
    if batch.trained_BT is not None:
        loss_BT = loss_BT * batch.trained_BT
    if batch.reference_logprobs_BT is not None:
        estimate = ESTIMATORS[settings.kl.estimator]
        loss_BT = loss_BT + kl_coef * estimate(scores.logprobs_BT - batch.reference_logprobs_BT)
    if settings.entropy_bonus:
        loss_BT = loss_BT - settings.entropy_bonus * scores.entropy_BT
    return loss_BT


def total(loss_BT: Tensor, batch: TrainingBatch, divisor: float) -> Tensor:
    """Return this micro-batch's share of the loss of the step: a weighted sum over tokens, over the divisor."""
    return (loss_BT * batch.mask_BT * batch.weights_B[:, None]).sum() / divisor


class Coefficient:
    """The price of a unit of KL, which is fixed or steered towards a target (Ziegler et al. 2019)."""

    GAIN = 0.1
    LARGEST_ERROR = 0.2  # so a step changes the coefficient by 2 % at most

    def __init__(self, settings: Kl) -> None:
        self.target = settings.target
        self.value = settings.coef

    def observe(self, measured: float) -> None:
        """Adapt the coefficient to the mean KL per token of the step that has ended."""
        if self.target is not None:
            error = measured / self.target - 1
            self.value *= 1 + self.GAIN * max(-self.LARGEST_ERROR, min(self.LARGEST_ERROR, error))

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.value}

    def load(self, state: dict[str, Any]) -> None:
        self.value = float(state["kl_coef"])
