"""Which sampler a configuration means, on this model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from trainer import distributed, hardware, levers
from trainer.config import Rollout
from trainer.errors import ConfigError
from trainer.rollouts import Sampler
from trainer.samplers import forward, limits, vllm_check
from trainer.samplers.decode import DecodeSampler
from trainer.samplers.hf import HfSampler
from trainer.samplers.publish import Outside


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
    reason = None if settings.engine == "hf" else forward.why_not(model)  # vLLM has none of this model: as `auto`
    if reason and settings.engine == "decode":
        raise ConfigError(
            f"rollout.engine=decode: it cannot sample from this model: {reason}. Write rollout.engine=hf."
        )
    if reason:
        say(f"rollout: sampling with model.generate, which is slower, because of the model: {reason}")
    if reason or settings.engine == "hf":
        return HfSampler(model, tokenizer, stop_tokens, settings.rows, say)
    return DecodeSampler(model, tokenizer, stop_tokens, settings.rows, say, copies)


def may_colocate(settings: Rollout) -> bool:
    """Whether vLLM may come into this process, which then has to be in a process group."""
    found = settings.engine == "auto" and distributed.on_gpu() and find_spec("vllm") is not None
    return settings.engine == "vllm_colocate" or (found and not settings.asks_servers)


def make_outside(run: Outside) -> Sampler | None:
    """vLLM, where the settings mean it or `auto` finds it."""
    if run.config.rollout.asks_servers:
        from trainer.samplers import vllm_server

        return vllm_server.connect(run)
    reason = "rollout.engine" if run.config.rollout.engine == "vllm_colocate" else found_by_auto(run)
    if reason is None:
        return None
    from trainer.samplers.vllm_colocate import VllmColocateSampler

    run.say(f"rollout: vLLM in this process ({reason})")
    return VllmColocateSampler(run)


def found_by_auto(run: Outside) -> str | None:
    """Why `auto` takes the vLLM of this environment; None where it does not. It is not imported to find out.

    Every rank calls it, and all choose the same: a rank whose card has less room speaks for all."""
    if run.config.rollout.engine != "auto":
        return None
    is_here = find_spec("vllm") is not None
    why_not = None if not is_here else "there is no GPU" if not distributed.on_gpu() else _why_not_colocated(run)
    found = distributed.gather((is_here, why_not))
    if not any(is_here for is_here, _ in found):
        return None
    reasons = ["a rank has none" if not is_here else why_not for is_here, why_not in found]
    if reason := next(filter(None, reasons), None):
        run.say(f"rollout: by Octet itself and not by the vLLM of this environment: {reason}")
        return None
    return f"vLLM {vllm_check.installed()} is installed, and the card has room for it"


def _why_not_colocated(run: Outside) -> str | None:
    """By the plan of the run with vLLM, on what this process can have of the card."""
    shape = levers.planned_shape(run.config)
    if shape is None:
        return "memory is not planned for this model. rollout.engine=vllm_colocate takes it all the same"
    card = distributed.device()
    room = limits.free_bytes(card) + torch.cuda.memory_allocated(card)
    ranks, here = distributed.world_size(), distributed.ranks_here()
    return levers.Placement(shape, run.config, ranks, room, hardware.free_ram(), here).why_no_vllm
