"""Which sampler a configuration means, on this model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch

from trainer.config.settings import Rollout
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.memory import search
from trainer.memory.planner import CONTEXT, GB, SLEEPING, Plan
from trainer.ranks import distributed
from trainer.rollout import limits
from trainer.rollout.collect import Sampler
from trainer.rollout.decoder import forward
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.vllm import check as vllm_check
from trainer.rollout.vllm.publish import Outside


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
        from trainer.rollout.vllm import server as vllm_server

        return vllm_server.connect(run)
    reason = "rollout.engine" if run.config.rollout.engine == "vllm_colocate" else found_by_auto(run)
    if reason is None:
        return None
    from trainer.rollout.vllm.colocate import VllmColocateSampler

    run.say(f"rollout: vLLM in this process ({reason})")
    return VllmColocateSampler(run)


def found_by_auto(run: Outside) -> str | None:
    """Why `auto` takes the vLLM of this environment; None where it does not. It is not imported to find out.

    Every rank calls it, and all choose the same: a rank whose card has less room speaks for all."""
    if run.config.rollout.engine != "auto":
        return None
    is_here = find_spec("vllm") is not None
    found = distributed.gather((is_here, _why_not_colocated(run) if is_here else None))
    if not any(is_here for is_here, _ in found):
        return None
    reasons = ["a rank has none" if not is_here else why_not for is_here, why_not in found]
    if reason := next(filter(None, reasons), None):
        run.say(f"rollout: by Octet itself and not by the vLLM of this environment: {reason}")
        return None
    return f"vLLM {vllm_check.installed()} is installed, and the card has room for it"


def _why_not_colocated(run: Outside) -> str | None:
    """By the plan of the run with vLLM, and what other programs leave of the card."""
    if not distributed.on_gpu():
        return "there is no GPU"
    if reason := vllm_check.why_not_by_itself():
        return reason
    shape, card = search.planned_shape(run.config), distributed.device()
    if shape is None:
        return "memory is not planned for this model. rollout.engine=vllm_colocate takes it all the same"
    size = torch.cuda.get_device_properties(card).total_memory
    ranks, here = distributed.world_size(), distributed.ranks_here()
    placement = search.Placement(shape, run.config, ranks, size, local_size=here)
    room = limits.free_bytes(card) + torch.cuda.memory_allocated(card) + CONTEXT
    return placement.why_no_vllm or why_no_room(placement.with_vllm.plan, room, hardware.free_ram())


def why_no_room(planned: Plan, room: int, free_ram: int) -> str | None:
    """On a machine where the policy is loaded already: of the RAM only the sleeping weights are still to come."""
    if planned.peak > room:
        return f"with it {planned.peak / GB:.1f} GB are planned, and others leave {room / GB:.1f} GB of the card"
    if (sleeping := planned.ram["run"].get(SLEEPING, 0)) > free_ram:
        return f"while it sleeps it takes {sleeping / GB:.1f} GB of RAM, and {free_ram / GB:.1f} GB are free"
    return None
