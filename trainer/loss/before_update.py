"""loss: what an objective has to know before the first update of a step moves the policy.

Each forward pass here is made only if its result cannot be had otherwise:

- *old log-probs* are those of the first training pass over a batch. Only a batch that is trained on after another one
  has moved the policy is scored before.
- *entropies* of all tokens, if only the most uncertain tokens of the step are trained on.
- *reference log-probs*, if the KL has a price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from trainer.batch.pack import Packer, to_tensors
from trainer.config.settings import Algorithm
from trainer.loss.kl import ESTIMATORS
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import ScoredGroup, TrainingBatch, TrainingRow


def scored_before(
    policy: Policy, batches: Sequence[TrainingBatch], settings: Algorithm, is_first: bool
) -> list[TrainingBatch]:
    """Return the batches of one update with what the objective needs. `is_first`: no update comes before it.

    The ranks meet only after the last forward pass, so that one of them may run out of memory and begin again.
    """
    batches = list(batches)
    is_known = all(batch.reference_logprobs_BT is not None for batch in batches)  # of a teacher
    if settings.kl.coef and settings.kl.where == "loss" and not is_known:
        with policy.as_reference():
            measured = [policy.measure(batch).logprobs_BT for batch in batches]
        batches = [replace(batch, reference_logprobs_BT=one) for batch, one in zip(batches, measured, strict=True)]
    if settings.top_entropy < 1:
        return _with_uncertain_tokens(policy, batches, settings.top_entropy)
    if not is_first:
        return [replace(batch, old_logprobs_BT=policy.measure(batch).logprobs_BT) for batch in batches]
    return batches


def _with_uncertain_tokens(policy: Policy, batches: Sequence[TrainingBatch], share: float) -> list[TrainingBatch]:
    scores = [policy.measure(batch) for batch in batches]
    entropies_N = [one.entropy_BT[batch.counted_BT].cpu() for one, batch in zip(scores, batches, strict=True)]
    least = threshold(torch.cat([torch.empty(0), *entropies_N]), share)
    return [
        replace(batch, old_logprobs_BT=one.logprobs_BT, trained_BT=one.entropy_BT >= least)
        for one, batch in zip(scores, batches, strict=True)
    ]


def threshold(entropies_N: Tensor, share: float) -> float:
    """Return the smallest entropy among the uppermost share of the tokens of all ranks."""
    counts = distributed.gather(len(entropies_N))
    everywhere_N = torch.cat([torch.zeros(count) for count in counts])
    everywhere_N.split(counts)[distributed.rank()].copy_(entropies_N)
    distributed.sum_in_place(everywhere_N)
    if not len(everywhere_N):
        return 0.0
    return float(everywhere_N.topk(ceil(share * len(everywhere_N))).values[-1])


def divergences(
    policy: Policy, rows: Sequence[TrainingRow], packer: Packer, device: torch.device, estimator: str
) -> list[float]:
    """Return the KL of each row to the reference, summed over its tokens."""
    estimate, found = ESTIMATORS[estimator], [0.0] * len(rows)
    for indices in packer.arrange(rows):
        batch = to_tensors([rows[index] for index in indices], packer.pad_token).to(device)
        ours_BT = policy.measure(batch).logprobs_BT
        with policy.as_reference():
            theirs_BT = policy.measure(batch).logprobs_BT
        for index, divergence in zip(indices, estimate(ours_BT - theirs_BT).sum(dim=1).tolist(), strict=True):
            found[index] = divergence
    return found


def without_kl(group: ScoredGroup, penalties_G: Sequence[float]) -> ScoredGroup:
    """Return the group with a penalty taken off each reward."""
    scores = [
        score if score.reward is None else replace(score, reward=score.reward - penalty)
        for score, penalty in zip(group.scores, penalties_G, strict=True)
    ]
    return replace(group, scores=tuple(scores))
