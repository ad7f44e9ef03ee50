"""Chooses the sampler that a configuration asks for."""

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from trainer.config.settings import Rollout
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.plan import search
from trainer.plan.planner import CONTEXT, GB, SLEEPING, Plan
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.rollout import limits
from trainer.rollout.collect import Sampler, SamplingContext
from trainer.rollout.decoder.forward import why_unsupported
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.turns import TurnTaking
from trainer.rollout.vllm import check


def make_sampler(
    settings: Rollout,
    model: Any,
    tokenizer: Any,
    stop_tokens: Sequence[int],
    say: limits.Say = limits.on_stderr,
    copies: bool = True,
    stop_strings: Sequence[str] = (),
    prompter: Prompter | None = None,
) -> Sampler:
    """Return one of Octet's own samplers. Unless `engine` is `hf`, that is the fast one if it supports the model.
    Without `copies` the layers are called as they are, which is slower, but no adapter is merged into copies: a model
    with an adapter is evaluated like this, so that the merged model is compared with the adapter itself."""
    reason = None if settings.engine == "hf" else why_unsupported(model)
    if reason and settings.engine == "decode":
        why = f"it cannot sample from this model: {reason}"
        raise ConfigError("rollout.engine=decode", why, "Write rollout.engine=hf")
    if reason:
        say(f"rollout: sampling with model.generate, which takes three times as long or more, because {reason}")
    turns = partial(TurnTaking, prompter=prompter, limits=settings.turns)
    kind = HfSampler if reason or settings.engine == "hf" else partial(DecodeSampler, copies=copies)
    return kind(model, tokenizer, stop_tokens, settings.rows, say, stop_strings, turns)


def may_colocate(settings: Rollout) -> bool:
    """Return True if vLLM may be started in this process, which then has to be in a process group."""
    found = settings.engine == "auto" and distributed.on_gpu() and find_spec("vllm") is not None
    return settings.engine == "vllm_colocate" or (found and not settings.uses_servers)


def make_vllm_sampler(context: SamplingContext) -> Sampler | None:
    """Return a sampler that uses vLLM, or None if the settings ask for another engine. Every rank calls it."""
    if context.config.rollout.uses_servers:
        from trainer.rollout.vllm import server

        return server.connect(context)
    reason = "rollout.engine" if context.config.rollout.engine == "vllm_colocate" else why_auto_colocates(context)
    if reason is None:
        return None
    from trainer.rollout.vllm.colocate import VllmColocateSampler

    context.say(f"rollout: vLLM in this process ({reason})")
    return VllmColocateSampler(context)


def why_auto_colocates(context: SamplingContext) -> str | None:
    """Return why `auto` uses the vLLM of this environment, or None if it does not. vLLM is not imported to find out.
    Every rank calls it, and all of them decide alike: vLLM is used only if the card of every rank has room for it."""
    if context.config.rollout.engine != "auto":
        return None
    is_here = find_spec("vllm") is not None
    found = distributed.gather((is_here, _why_not_colocated(context) if is_here else None))
    if not any(is_here for is_here, _ in found):
        return None
    reasons = ["a rank has none" if not is_here else why_not for is_here, why_not in found]
    if reason := next(filter(None, reasons), None):
        context.say(f"rollout: sampling without the vLLM of this environment: {reason}")
        return None
    return f"vLLM {check.installed()} is installed, and the card has room for it"


def _why_not_colocated(context: SamplingContext) -> str | None:
    """Compare the plan of the run with vLLM with the memory that other programs leave free."""
    if not distributed.on_gpu():
        return "there is no GPU"
    if reason := check.why_not_automatic():
        return reason
    shape, card = search.planned_shape(context.config.model), distributed.device()
    if shape is None:
        return "memory cannot be planned for this model. rollout.engine=vllm_colocate uses it all the same"
    size = torch.cuda.get_device_properties(card).total_memory
    ranks, here = distributed.world_size(), distributed.ranks_here()
    placement = search.Placement(shape, context.config, ranks, size, local_size=here)
    room = limits.free_bytes(card) + torch.cuda.memory_allocated(card) + CONTEXT
    return placement.why_no_vllm or why_no_room(placement.with_vllm.plan, room, hardware.free_ram())


def why_no_room(planned: Plan, room: int, free_ram: int) -> str | None:
    """Return what does not fit. The policy is loaded already, so only vLLM's sleeping weights need more RAM."""
    if planned.peak > room:
        return f"with it {planned.peak / GB:.1f} GB are planned, and others leave {room / GB:.1f} GB of the card"
    if (sleeping := planned.ram["run"].get(SLEEPING, 0)) > free_ram:
        return f"while it sleeps it takes {sleeping / GB:.1f} GB of RAM, and {free_ram / GB:.1f} GB are free"
    return None
