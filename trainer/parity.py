"""Is what samples the policy that is trained? Some tokens are scored both ways before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainer import distributed
from trainer.batches import Packer
from trainer.errors import ConfigError
from trainer.logprobs import Scores
from trainer.loop import Parts
from trainer.rollouts import Sampler
from trainer.samplers.limits import Say
from trainer.types import Prompt, Sampling, TrainingBatch, TrainingRow

TOKENS = 64  # on each rank
NOTABLE = 0.05  # mean difference of a log-prob that rounding does not make

Measure = Callable[[TrainingBatch], Scores]


def check(parts: Parts) -> None:
    """Of a run. Every rank calls it."""
    with parts.policy.gathered():
        apart = differences_of(parts)
    judge(apart, parts.config.rollout.vllm.max_difference, parts.screen.say)


def differences_of(parts: Parts) -> list[float]:
    prompts, sampling = parts.prompts_of(parts.first_step), parts.sampling_of(parts.first_step)
    return differences(parts.policy.measure, parts.packer, parts.device, parts.sampler, prompts, sampling)


def judge(apart: Sequence[float], limit: float, say: Say) -> None:
    """What to make of the differences of single tokens."""
    mean, most = sum(apart) / len(apart), max(apart)
    found = f"the log-probs of sampler and trainer differ by {mean:.1e} in the mean of {len(apart)} tokens"
    say(f"rollout: {found}, by {most:.1e} at most")
    if mean > limit:
        raise ConfigError(
            f"rollout.vllm.max_difference={limit:g}: {found}, so another model samples. Compare the model, its "
            "precision and its quantisation on both sides; a larger value goes on all the same."
        )
    if mean > NOTABLE:
        say("rollout: that is more than rounding: compare model, precision and quantisation on both sides")


@torch.no_grad()
def differences(
    measure: Measure, packer: Packer, device: Any, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling
) -> list[float]:
    """Of some tokens on every rank, which all call it."""
    rows: list[TrainingRow] = []
    for index, completions in sampler.sample(prompts, sampling):
        rows += [TrainingRow(prompts[index].tokens, one.tokens, one.logprobs, advantage=0.0) for one in completions]
        if sum(len(row.completion) for row in rows) >= TOKENS:
            break
    apart: list[float] = []
    for batch in (batch.to(device) for batch in packer.pack(rows)):
        apart += (measure(batch).logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().tolist()
    return [difference for of_rank in distributed.gather(apart[:TOKENS]) for difference in of_rank]
