"""loss: the metrics of a training pass, token by token."""

import torch
from torch import Tensor

from trainer.config.settings import Algorithm
from trainer.loss.objectives import ESTIMATORS, correction, mean_over_row, mismatch
from trainer.records import MeasuredBatch, Scores
from trainer.watch.tally import Max, Std, Tally


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
