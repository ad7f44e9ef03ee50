"""loss: what a teacher says about the answers of the policy, token by token (on-policy distillation).

The reverse KL of the policy to the teacher, estimated from the sampled token, is log pi - log pi_teacher. It enters

    advantage   A_t = reward x A - weight x (log pi_sampler - log pi_teacher)        (Lu and Thinking Machines 2025)
    loss        kl.coef x its estimator k2, with the teacher as the reference: the gradient is an estimate of that of
                GKD with beta = 1 (Agarwal et al. 2024), from one token instead of the whole vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.config.settings import Teacher
from trainer.records import PreparedBatch, TrainingBatch

TeacherLogprobs = Callable[[Sequence[TrainingBatch]], Sequence[Tensor]]  # returns the log-probs_BT of each batch


@torch.no_grad()
def with_teacher(
    batch: TrainingBatch, teacher_BT: Tensor, reference_BT: Tensor | None, settings: Teacher
) -> PreparedBatch:
    """Return a batch with what the teacher says about it, and the log-probs of the reference if there is one."""
    share = settings.reward
    weighed = replace(batch, advantages_B=share * batch.advantages_B, rewards_B=share * batch.rewards_B)
    if settings.form == "loss":
        return weighed.prepared(teacher_BT)
    apart_BT = batch.sampled_logprobs_BT - teacher_BT
    return weighed.prepared(reference_BT, weighed.advantages_B[:, None] - settings.weight * apart_BT)
