"""An HTTP client for one vLLM server, with retries, and checks of the server before the first step."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.settings import Lora, Vllm
from trainer.errors import ConfigError, OctetError, TrainingError
from trainer.machine.http_client import LONGEST_WAIT_S, NoReply, exchange, read_key
from trainer.rollout.limits import Say
from trainer.rollout.vllm.process import ServerProcess
from trainer.rollout.vllm.publish import MODE, SLOTS, Published

T = TypeVar("T")

KEY = "VLLM_API_KEY"  # the variable that vLLM itself reads
LARGEST_REPLY = 1 << 30  # bytes
TIMEOUT_S = 60.0  # for requests that do not sample
WEIGHTS_S = 600.0  # timeout for the weights of a whole model
LONGEST_PAUSE_S = 5.0  # between two attempts
SAY_EVERY_S = 15.0
INVALID_REPLIES = 3  # this many invalid replies to one request end the run
OLDEST = (0, 12)  # the oldest version that works; docs/vllm.md lists what was run with each version
TESTED = ("0.12.0", "0.16.0", "0.22.1", "0.28.0", "0.32.0")  # versions that were tested as servers
REJECTED = ("add_lora", "max_lora_rank", "LoRA is not enabled")  # texts of a refusal that a retry would not change
NEEDED = (
    "Start it for the model of this run with --enable-lora, a --max-lora-rank that holds the adapter, and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and let both machines mount the run folder at one place"
)


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


class InvalidReply(NoReply):
    """A reply that does not answer the request."""


class Server:
    """The routes of one server. Each method makes a single attempt, and raises `NoReply` if it fails. `setting` names
    the server in errors."""

    def __init__(self, url: str, process: ServerProcess | None = None, setting: str = "rollout.vllm.urls") -> None:
        self.url = url
        self.where = f"{setting}={url}"
        self.process = process  # None if this rank has not started the server
        self.base = ""  # the server's name for the base model; the caller of `describe` sets this and `max_model_len`
        self.max_model_len: int | None = None
        self._key = read_key(KEY, self.where)

    def ask(self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """Return the JSON of a reply to a POST, or to a GET if there is no body."""
        try:
            return json.loads(self._send(path, body, timeout_s))
        except (ValueError, RecursionError):
            raise InvalidReply(f"{self.url}{path}: the reply is not JSON") from None

    def describe(self, name: str | None = None) -> tuple[str, int | None]:
        """Return the server's name for the base model, or `name` if it has this model, and its context length."""
        try:
            cards = self.ask("/v1/models")["data"]
        except NoReply as failure:
            if failure.status != 404:
                raise
            reason = "this is not a vLLM server: it has no /v1/models (HTTP 404)"
            remedy = "Write the address of a vLLM server, with its port and without a path"
            raise ConfigError(self.where, reason, remedy) from None
        base = next(card for card in cards if card.get("parent") is None)
        names = [str(card["id"]) for card in cards]
        if name is not None and name not in names:
            raise ConfigError(self.where, f"it has no model {name}, only {', '.join(names)}", "Name one of these")
        length = base.get("max_model_len")
        return name or str(base["id"]), None if length is None else int(length)

    def check(self, lora: Lora, say: Say) -> None:
        """Raise ConfigError if the settings cannot work. A server reports some of them only in development mode."""
        if facts := self._known("/version"):
            check_version(str(facts["version"]), self.where, say)
        settings = (self._known("/server_info?config_format=json") or {}).get("vllm_config", {})
        mode = settings.get("model_config", {}).get("logprobs_mode", MODE)
        if mode != MODE:
            reason = f"its log-probs are {mode}, without the temperature, so every ratio would be wrong"
            raise ConfigError(self.where, reason, f"Start it with --logprobs-mode {MODE}")
        if (replicas := settings.get("parallel_config", {}).get("data_parallel_size", 1)) > 1:
            reason = f"it has {replicas} replicas (--data-parallel-size), and a new adapter does not reach all of them"
            raise ConfigError(self.where, reason, "Start one server for each and name them all in rollout.vllm.urls")
        slots = settings.get("lora_config") or {}
        if lora.enabled and slots and slots["max_loras"] < SLOTS:
            reason = f"it holds {slots['max_loras']} adapter, but a new one is loaded before the old one is removed"
            raise ConfigError(self.where, reason, f"Start it with --max-loras {SLOTS}")

    def _known(self, path: str) -> Any:
        """Return what the server says at a path, or None if it does not have this route."""
        with suppress(NoReply):
            return self.ask(path)

    def must_be(self, asked: str, answered: Any) -> None:
        """Raise TrainingError if a different model has answered."""
        if answered != asked:
            reason = f"the request was for {asked}, and {str(answered)[:100]} answered"
            remedy = "A program between the trainer and vLLM changes the model; write the address of the server itself"
            raise TrainingError(self.where, reason, remedy)

    def load_adapter(self, adapter: Published) -> None:
        """Load an adapter, unless the server already has it."""
        try:
            self._send("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.path)})
        except NoReply as failure:
            text = str(failure)
            if "already been loaded" in text:
                return
            if failure.again and not any(one in text for one in REJECTED):
                raise
            raise ConfigError(self.where, f"it does not load the adapter {adapter.path} ({text})", NEEDED) from None

    def unload_adapter(self, adapter: Published, timeout_s: float = TIMEOUT_S) -> None:
        """Remove an adapter. It is not an error if a restarted server does not have it."""
        try:
            self._send("/v1/unload_lora_adapter", {"lora_name": adapter.name}, timeout_s)
        except NoReply as failure:
            if failure.status != 404:
                raise

    def load_weights(self, whole: Published) -> None:
        """Have the workers of the server load the weights of a whole model."""
        arguments = [str(whole.path), whole.version]
        answer = self.ask("/collective_rpc", {"method": "octet_load", "args": arguments}, WEIGHTS_S)
        if set(answer["results"]) != {str(whole.version)}:  # one result from each worker
            raise TrainingError("rollout.engine=vllm_server", f"{self.url} did not take the weights: {answer}")
        self._send("/reset_prefix_cache", {})

    def _send(self, path: str, body: Mapping[str, Any] | None, timeout_s: float = TIMEOUT_S) -> bytes:
        try:
            return exchange(f"{self.url}{path}", body, timeout_s, LARGEST_REPLY, self._key, direct=True)
        except NoReply as failure:
            if self.process is not None:
                self.process.check()
            remedy = f" (set {KEY} to the key of this server)" if failure.status in (401, 403) else ""
            reason = f"{self.url}: {failure}{remedy}"
            again = failure.again or failure.wait_s > LONGEST_WAIT_S  # `Retry` has its own limit
            raise NoReply(reason, again, status=failure.status) from None


@dataclass(slots=True)
class Retry:
    """Retries one request until a server answers, for at most `rollout.vllm.wait_s`, and reports long waits."""

    settings: Vllm
    say: Say
    stop: threading.Event
    where: str = "rollout.engine=vllm_server"
    begins: bool = False  # before the first step
    began: float | None = None  # when the first attempt failed
    invalid_replies: int = 0

    def call(self, request: Callable[[], T], url: str) -> T:
        """Return the result of `request`. An exception while a reply is read counts as an invalid reply."""
        while True:
            try:
                return request()
            except NoReply as error:
                failure = error
            except OctetError:
                raise
            except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, StopIteration) as error:
                failure = InvalidReply(f"{url}: the reply is not from vLLM ({type(error).__name__}: {error})")
            self.wait(failure)

    def wait(self, failure: NoReply) -> None:
        """Pause before the next attempt, or raise if there should be none."""
        now = time.monotonic()
        self.began = now if self.began is None else self.began
        waited_s = now - self.began
        self.invalid_replies += isinstance(failure, InvalidReply)
        if reason := self._why_give_up(failure, waited_s):
            text = str(failure).removeprefix(self.where.partition("=")[2]).removeprefix(": ")  # `where` has the URL
            raise TrainingError(self.where, text, reason)
        if waited_s > SAY_EVERY_S:
            self.say(f"waiting for vLLM, {waited_s:.0f} s so far: {failure}")
        self.stop.wait(min(LONGEST_PAUSE_S, 0.1 + waited_s / 4))

    def _why_give_up(self, failure: NoReply, waited_s: float) -> str | None:
        if self.stop.is_set():
            return "Sampling was stopped."
        if not failure.again:
            return "A retry would fail in the same way; the log of the server says more."
        if self.invalid_replies >= INVALID_REPLIES:
            return f"There were {self.invalid_replies} invalid replies to one request. Is this a tested vLLM?"
        if waited_s > self.settings.wait_s:
            remedy = "Read the log of the server; when it runs again, --resume continues from the last checkpoint."
            if self.begins:
                remedy = "Start the server first, or write the address of one that runs."
            return f"Octet has waited for {waited_s:.0f} s (rollout.vllm.wait_s={self.settings.wait_s:g}). {remedy}"
        return None


def rate_limited(say: Say) -> Say:
    """Drop messages that closely follow another, because many groups may wait for the same server."""
    lock, last = threading.Lock(), -math.inf

    def say_sometimes(text: str) -> None:
        nonlocal last
        with lock:
            if time.monotonic() - last > SAY_EVERY_S:
                last = time.monotonic()
                say(text)

    return say_sometimes
