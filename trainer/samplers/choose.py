"""Which sampler a configuration means, on this model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config import Rollout
from trainer.errors import ConfigError
from trainer.rollouts import Sampler
from trainer.samplers import forward, limits
from trainer.samplers.decode import DecodeSampler
from trainer.samplers.hf import HfSampler


def make_sampler(
    settings: Rollout, model: Any, tokenizer: Any, stop_tokens: Sequence[int], say: limits.Say = limits.on_stderr
) -> Sampler:
    """`auto` takes the faster one wherever it gives the same answers, and says so where it does not."""
    reason = None if settings.engine == "hf" else forward.why_not(model)
    if reason and settings.engine == "decode":
        raise ConfigError(
            f"rollout.engine=decode: it cannot sample from this model: {reason}. Write rollout.engine=hf."
        )
    if reason:
        say(f"rollout: sampling with model.generate, which is slower, because of the model: {reason}")
    kind = HfSampler if reason or settings.engine == "hf" else DecodeSampler
    return kind(model, tokenizer, stop_tokens, settings.rows, say)
