"""Chooses the sampler that a configuration asks for."""

from typing import Any

from trainer.config.settings import Rollout
from trainer.errors import ConfigError
from trainer.problem.prompts import Prompter
from trainer.rollout import limits
from trainer.rollout.decoder.eight_bits import check_card
from trainer.rollout.decoder.forward import reasons_against
from trainer.rollout.decoder.sampler import DecodeSampler
from trainer.rollout.hf import HfSampler
from trainer.rollout.interface import Sampler, SamplingContext
from trainer.rollout.turns import Stops, TurnTaking


def make_sampler(
    settings: Rollout,
    model: Any,
    stops: Stops,
    say: limits.Say = limits.on_stderr,
    copies: bool = True,
    prompter: Prompter | None = None,
) -> Sampler:
    """Return one of Octet's own samplers: the decoder if it supports the model and `engine` is not `hf`, otherwise
    `model.generate`. Without `copies` the decoder calls the model's layers, which is slower, but keeps the adapter
    apart. Evaluations use this, so that a merged model is compared with the adapter itself."""
    reason = None if settings.engine == "hf" else next(reasons_against(model), None)
    in_8_bits = copies and settings.weights != "same"
    if reason and (in_8_bits or settings.engine == "decode"):
        setting = f"rollout.weights={settings.weights}" if in_8_bits else "rollout.engine=decode"
        remedy = "Write rollout.engine=hf and rollout.weights=same"
        raise ConfigError(setting, f"Octet's own decoder cannot sample from this model: {reason}", remedy)
    if in_8_bits:
        check_card(settings.weights, model.device)
    if reason:
        say(f"rollout: sampling with model.generate, which takes three times as long or more, because {reason}")
    turns = TurnTaking(stops, prompter, settings.turns)
    if reason or settings.engine == "hf":
        return HfSampler(model, turns, settings.rows, say)
    return DecodeSampler(model, turns, settings.rows, say, copies=copies, weights=settings.weights)


def make_vllm_sampler(context: SamplingContext) -> Sampler | None:
    """Return a sampler that uses vLLM, or None if the settings ask for another engine. Every rank calls it."""
    if context.config.rollout.uses_servers:
        from trainer.rollout.vllm import server

        return server.connect(context)
    if context.config.rollout.engine != "vllm_colocate":
        return None
    from trainer.rollout.vllm.colocate import VllmColocateSampler

    context.say("rollout: vLLM in this process")
    return VllmColocateSampler(context)
