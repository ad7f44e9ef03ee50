"""loss: the inputs of an objective that must be computed before the first update of a step.

A forward pass is made only for results that cannot be obtained otherwise:

- *old log-probs*, for batches of the second and later updates. The first update takes those of its training pass.
- *entropies* of all tokens, if only the most uncertain tokens of the update are trained on.
- *reference log-probs*, if the KL has a coefficient.

A teacher rates each token of an answer (on-policy distillation). The reverse KL of the policy to the teacher is
estimated from the sampled token as log pi - log pi_teacher. It enters

    advantage   A_t = reward x A - weight x (log pi_sampler - log pi_teacher)        (Lu and Thinking Machines 2025)
    loss        kl.coef x its estimator k2, with the teacher as the reference: the gradient is an estimate of that of
                GKD with beta = 1 (Agarwal et al. 2024), from one token instead of the whole vocabulary
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from trainer.config.settings import Config, Teacher
from trainer.loss.objectives import ESTIMATORS
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import TrainingBatch

TeacherLogprobs = Callable[[Sequence[TrainingBatch]], Sequence[Tensor]]  # returns the log-probs_BT of each batch


def prepared(
    policy: Policy,
    batches: Sequence[TrainingBatch],
    config: Config,
    is_first: bool,
    teacher: TeacherLogprobs | None = None,
) -> list[TrainingBatch]:
    """Return the batches of one update with the inputs of the objective. `is_first` is True for the first update of a
    step. Collective operations come after all forward passes, so that a rank that runs out of memory can start over."""
    ready = _with_reference(policy, batches, config)
    if teacher is not None:
        ready = [with_teacher(*pair, config.teacher) for pair in zip(ready, teacher(batches), strict=True)]
    if config.algorithm.top_entropy < 1:
        return _with_uncertain_tokens(policy, ready, config.algorithm.top_entropy)
    if not is_first:
        return [batch.measured(policy.measure(batch).logprobs_BT) for batch in ready]
    return ready


@torch.no_grad()
def with_teacher(batch: TrainingBatch, teacher_BT: Tensor, settings: Teacher) -> TrainingBatch:
    """Return a batch in which the log-probs of the teacher enter the advantages, or replace those of the reference."""
    share = settings.reward
    weighted = replace(batch, advantages_B=share * batch.advantages_B, rewards_B=share * batch.rewards_B)
    if settings.form == "loss":
        return replace(weighted, reference_logprobs_BT=teacher_BT)
    difference_BT = batch.sampled_logprobs_BT - teacher_BT
    return replace(weighted, token_advantages_BT=weighted.advantages_B[:, None] - settings.weight * difference_BT)


def _with_reference(policy: Policy, batches: Sequence[TrainingBatch], config: Config) -> list[TrainingBatch]:
    """Return the batches with the log-probs of the reference, if the loss uses them."""
    kl, by_teacher = config.algorithm.kl, config.teacher.is_there and config.teacher.form == "loss"
    if not kl.coef or kl.where != "loss" or by_teacher:
        return list(batches)
    with policy.as_reference():
        return [replace(batch, reference_logprobs_BT=policy.measure(batch).logprobs_BT) for batch in batches]


def _with_uncertain_tokens(policy: Policy, batches: Sequence[TrainingBatch], share: float) -> list[TrainingBatch]:
    scores = [policy.measure(batch) for batch in batches]
    entropies_N = [one.entropy_BT[batch.counted_BT].cpu() for one, batch in zip(scores, batches, strict=True)]
    least = threshold(torch.cat([torch.empty(0), *entropies_N]), share)
    pairs = zip(batches, scores, strict=True)
    return [batch.measured(one.logprobs_BT, trained_BT=one.entropy_BT >= least) for batch, one in pairs]


def threshold(entropies_N: Tensor, share: float) -> float:
    """Return the smallest entropy among the most uncertain share of the tokens of all ranks."""
    counts = distributed.gather(len(entropies_N))
    everywhere_N = torch.cat([torch.zeros(count) for count in counts])
    everywhere_N.split(counts)[distributed.rank()].copy_(entropies_N)
    distributed.sum_in_place(everywhere_N)
    if not len(everywhere_N):
        return 0.0
    return float(everywhere_N.topk(ceil(share * len(everywhere_N))).values[-1])


def divergences(policy: Policy, batch: TrainingBatch, estimator: str) -> list[float]:
    """Return the KL of each row to the reference, summed over its tokens."""
    ours_BT = policy.measure(batch).logprobs_BT
    with policy.as_reference():
        difference_BT = ours_BT - policy.measure(batch).logprobs_BT
    return ESTIMATORS[estimator](difference_BT).sum(dim=1).tolist()
