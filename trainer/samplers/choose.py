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
    settings: Rollout,
    model: Any,
    tokenizer: Any,
    stop_tokens: Sequence[int],
    say: limits.Say = limits.on_stderr,
    copies: bool = True,
) -> Sampler:
    """`auto` takes the faster one wherever it gives the same answers, and says so where it does not.

    Without `copies` it samples with the layers as they are: slower, and no adapter is merged on the way, which is what
    an evaluation is compared with when the adapter has been merged for good.
    """
    reason = None if settings.engine == "hf" else forward.why_not(model)
    if reason and settings.engine == "decode":
        raise ConfigError(
            f"rollout.engine=decode: it cannot sample from this model: {reason}. Write rollout.engine=hf."
        )
    if reason:
        say(f"rollout: sampling with model.generate, which is slower, because of the model: {reason}")
    if reason or settings.engine == "hf":
        return HfSampler(model, tokenizer, stop_tokens, settings.rows, say)
    return DecodeSampler(model, tokenizer, stop_tokens, settings.rows, say, copies)
