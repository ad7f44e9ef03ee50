"""loss: the metrics of a training pass, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.config.settings import Algorithm
from trainer.loss.kl import ESTIMATORS
from trainer.loss.objectives import correction, mean_over_row, mismatch
from trainer.records import Scores, TrainingBatch
from trainer.watch.tally import LARGEST, Tally


def tally_batch(tally: Tally, batch: TrainingBatch, scores: Scores, settings: Algorithm) -> int:
    """Count what a training pass shows, token by token: entropy, and the distance of the policy from the others.

    Return the number of tokens. Indexing with a mask waits for the card each time, so places are looked up once.
    """
    counted_N, rows_N = (mask.flatten().nonzero()[:, 0] for mask in (batch.counted_BT, batch.weights_B > 0))
    assert batch.old_logprobs_BT is not None, "the first pass over a batch stores them"
    if not len(counted_N):
        return 0

    def counted(values_BT: Tensor) -> Tensor:
        return values_BT.flatten()[counted_N]

    now_BT = scores.logprobs_BT.detach()
    mismatch_BT = mismatch(batch.old_logprobs_BT, batch.sampled_logprobs_BT, batch.mask_BT, settings.correction)
    moved_BT = now_BT - batch.old_logprobs_BT
    if settings.loss == "gspo":
        moved_BT = mean_over_row(moved_BT, batch.mask_BT).expand_as(moved_BT)
    of_tokens = batch.advantages_B[:, None] if batch.advantages_BT is None else batch.advantages_BT
    advantages_BT = of_tokens.expand_as(moved_BT)
    sums = {
        "entropy": counted(scores.entropy_BT.detach()),
        **_sampler_metrics(counted(batch.old_logprobs_BT - batch.sampled_logprobs_BT)),
        "sampler_ratio/raw": counted(mismatch_BT),
        "sampler_ratio/corrected": counted(correction(mismatch_BT, settings.correction)),
        **_ratio_metrics(counted(moved_BT).exp(), counted(advantages_BT), settings),
    }
    if batch.reference_logprobs_BT is not None:
        sums["kl"] = ESTIMATORS[settings.kl.estimator](counted(now_BT - batch.reference_logprobs_BT))
    if batch.advantages_BT is not None:
        sums["advantage/token"] = counted(advantages_BT)
    sums |= {"advantage/mean": batch.advantages_B[rows_N], "advantage/square": batch.advantages_B[rows_N].square()}
    reduced = [values.max() if name.endswith(LARGEST) else values.float().sum() for name, values in sums.items()]
    for (name, values), value in zip(sums.items(), torch.stack(reduced).tolist(), strict=True):  # one wait for the card
        tally.add(name, value, len(values))
    return len(counted_N)


def _sampler_metrics(apart_N: Tensor) -> dict[str, Tensor]:
    """Compare the policy that answered with the log-probs that came with the answers. The KL is the k3 estimate."""
    size_N = apart_N.abs()
    divergence_N = apart_N.expm1() - apart_N
    return {"sampler_difference": size_N, f"sampler_difference{LARGEST}": size_N, "sampler_kl": divergence_N}


def _ratio_metrics(ratio_N: Tensor, advantages_N: Tensor, settings: Algorithm) -> dict[str, Tensor]:
    """Compare the policy with the one that answered; count how often the clip on the advantage's side is exceeded."""
    low_N = (ratio_N < 1 - settings.clip_low) & (advantages_N < 0)
    high_N = (ratio_N > 1 + settings.clip_high) & (advantages_N > 0)
    return {"ratio": ratio_N, f"ratio{LARGEST}": ratio_N, "clipped/low": low_N, "clipped/high": high_N}
