"""loss: the objectives, as pure functions of log-probs and advantages that return a loss for each token, and what the
log says about them.

The divisor of their sum belongs to the whole step (`batch/pack.py`). With a mean of means, the weight of a token would
depend on the other tokens in its micro-batch, which can even flip the sign of the gradient.

The KL measures how far the policy has moved from a reference. It is estimated from the sampled tokens (Schulman 2020),
and added to the loss here or subtracted from the rewards in `step/update.py`. With d = log pi - log pi_ref of a token:

    k1   d                   unbiased, may be negative; for the reward: in a loss its gradient is zero on average
    k2   d^2 / 2             on policy, its gradient is that of the true KL
    k3   exp(-d) + d - 1     unbiased, never negative, low variance; its gradient is that of the KL from pi_ref to pi
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer.config.settings import Algorithm, Correction, Kl
from trainer.records import MeasuredBatch, Scores, TrainingBatch
from trainer.watch.tally import Max, Std, Tally

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": lambda difference: (-difference).expm1() + difference,
}
# Returns the loss of each token, given log-probs with a gradient, and a batch with those of the sampling policy.
Loss = Callable[[Tensor, MeasuredBatch, Algorithm], Tensor]


def reinforce(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -R log pi, with the reward in place of an advantage."""
    return -batch.rewards_B[:, None] * logprobs_BT


def reinforce_baseline(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -A log pi."""
    return -batch.advantages_BT * logprobs_BT


def grpo_clip(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return -min(ratio A, clip(ratio) A) for each token, with ratio = pi / pi_old."""
    return pessimistic((logprobs_BT - batch.old_logprobs_BT).exp(), batch.advantages_BT, settings)


def gspo(logprobs_BT: Tensor, batch: MeasuredBatch, settings: Algorithm) -> Tensor:
    """Return the loss of `grpo_clip` with one ratio per row, the geometric mean of the ratios of its tokens."""
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
    """Return the larger of the clipped and the unclipped loss. `dual_clip` bounds the ratio from above, which has an
    effect only for negative advantages, because the upper clip is lower."""
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    bounded = ratio if settings.dual_clip is None else ratio.clamp(max=settings.dual_clip)
    return -torch.minimum(bounded * advantages_BT, clipped * advantages_BT)


def mean_over_row(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return (values_BT * mask_BT).sum(dim=1, keepdim=True) / mask_BT.sum(dim=1, keepdim=True)


def mismatch(old_BT: Tensor, sampled_BT: Tensor, mask_BT: Tensor, settings: Correction) -> Tensor:
    """Return the ratio of probabilities under the policy before the update and under the sampler. They differ by the
    rounding of two programs, and by an update if the answers were sampled ahead."""
    difference_BT = old_BT - sampled_BT
    if settings.level == "sequence":
        return mean_over_row(difference_BT, mask_BT).exp().expand_as(difference_BT)
    return difference_BT.exp()


def correction(ratio_BT: Tensor, settings: Correction) -> Tensor:
    """Return the ratio as a weight that is truncated at the cap, or 0 above the cap."""
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
    """Return this micro-batch's share of the loss of the step: a weighted sum over tokens, divided by the divisor."""
    return (loss_BT * batch.mask_BT * batch.weights_B[:, None]).sum() / divisor


class Coefficient:
    """The coefficient of the KL, which is fixed or adapted to reach a target KL (Ziegler et al. 2019)."""

    GAIN = 0.1
    LARGEST_ERROR = 0.2  # limits the change of the coefficient to 2 % per step

    def __init__(self, settings: Kl) -> None:
        self.target = settings.target
        self.value = settings.coef

    def observe(self, measured: float) -> None:
        """Adapt the coefficient to the mean KL per token of the last step."""
        if self.target is not None:
            error = measured / self.target - 1
            self.value *= 1 + self.GAIN * max(-self.LARGEST_ERROR, min(self.LARGEST_ERROR, error))

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.value}

    def load(self, state: dict[str, Any]) -> None:
        self.value = float(state["kl_coef"])


def tally_batch(tally: Tally, batch: MeasuredBatch, scores: Scores, settings: Algorithm) -> int:
    """Tally the entropy of each token, and the differences between the policy, the sampler and the reference. Return
    the number of tokens. Indexing with a mask waits for the card each time, so indices are computed once."""
    counted_N, rows_N = (mask.flatten().nonzero()[:, 0] for mask in (batch.counted_BT, batch.weights_B > 0))
    if not len(counted_N):
        return 0

    def counted(values_BT: Tensor) -> Tensor:
        return values_BT.flatten()[counted_N]

    now_BT = scores.logprobs_BT.detach()
    mismatch_BT = mismatch(batch.old_logprobs_BT, batch.sampled_logprobs_BT, batch.mask_BT, settings.correction)
    moved_BT = now_BT - batch.old_logprobs_BT
    if settings.loss == "gspo":
        moved_BT = mean_over_row(moved_BT, batch.mask_BT).expand_as(moved_BT)
    advantages_BT = batch.advantages_BT.expand_as(moved_BT)
    difference_N = counted(batch.old_logprobs_BT - batch.sampled_logprobs_BT)
    ratio_N, advantages_N = counted(moved_BT).exp(), counted(advantages_BT)
    sums = {
        "entropy": counted(scores.entropy_BT.detach()),
        "sampler_difference": difference_N.abs(),
        "sampler_kl": difference_N.expm1() - difference_N,  # the k3 estimate
        "sampler_ratio/raw": counted(mismatch_BT),
        "sampler_ratio/corrected": counted(correction(mismatch_BT, settings.correction)),
        "ratio": ratio_N,
        # share of tokens that `grpo_clip` and `gspo` give no gradient
        "clipped/low": (ratio_N < 1 - settings.clip_low) & (advantages_N < 0),
        "clipped/high": (ratio_N > 1 + settings.clip_high) & (advantages_N > 0),
    }
    if batch.reference_logprobs_BT is not None:
        sums["kl"] = ESTIMATORS[settings.kl.estimator](counted(now_BT - batch.reference_logprobs_BT))
    if batch.token_advantages_BT is not None:
        sums["advantage/token"] = advantages_N
    largest = {"sampler_difference/max": sums["sampler_difference"], "ratio/max": ratio_N}
    advantages_B = batch.advantages_B[rows_N]
    reduced = [*(values.float().sum() for values in sums.values()), *(values.max() for values in largest.values())]
    reduced += [advantages_B.float().sum(), advantages_B.square().float().sum()]
    numbers = iter(torch.stack(reduced).tolist())  # waits for the card only once
    for name, values in sums.items():
        tally.add(name, next(numbers), len(values))
    tally.merge({name: Max(next(numbers)) for name in largest})
    tally.merge({"advantage": Std(next(numbers), next(numbers), len(rows_N))})
    return len(counted_N)
