"""rollout by servers of vLLM: token ids and log-probs over HTTP, and after each update the adapter alone.

A request asks for one group. What comes back has to be from the version that was asked for, with as many answers as
were asked for, each of which ends with a stop token or is as long as it may be; anything else is asked again or ends
the run. A server that is away is waited for; when it comes back without the adapter, it gets it again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from trainer.config.settings import Vllm
from trainer.errors import ConfigError, OctetError, TrainingError
from trainer.machine import threads
from trainer.machine.http_client import NoReply, exchange, read_key
from trainer.ranks import distributed
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.collect import Sampler
from trainer.rollout.limits import Say
from trainer.rollout.vllm import process as vllm_process
from trainer.rollout.vllm.check import check_server
from trainer.rollout.vllm.process import Started
from trainer.rollout.vllm.publish import NEUTRAL, Outside, Published, Publisher, seed_of

T = TypeVar("T")

KEY = "VLLM_API_KEY"  # vLLM's own name for it
LARGEST_REPLY = 1 << 30  # bytes
QUICK_S = 60.0  # for requests that sample nothing
LAST_S = 5.0  # for what is not needed any more
LONG_S = 600.0  # for the weights of a whole model
LONGEST_PAUSE_S = 5.0
SAYS_EVERY_S = 15.0
OPEN = 128  # requests of a rank at a server; what is beyond waits here
LIES_ALLOWED = 3  # answers to one request that are not what was asked for


class Server:
    """One server, as its protocol has it."""

    def __init__(self, url: str, process: Started | None = None) -> None:
        self.url = url
        self.process = process  # of one that this rank started
        self.base = ""  # its name for the base; `look` finds it out, and the longest context
        self.context: int | None = None
        self._key = read_key(KEY)

    def get(self, path: str) -> Any:
        return self._json(path, None, QUICK_S)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = QUICK_S) -> Any:
        return self._json(path, body, timeout_s)

    def look(self) -> tuple[str, int | None]:
        """The name that it has for the base, and its context."""
        try:
            cards = self.get("/v1/models")["data"]
        except NoReply as failure:
            if failure.status != 404:
                raise
            raise ConfigError(
                f"rollout.vllm.urls={self.url}: no vLLM answers there, because /v1/models is unknown (HTTP 404). Write "
                "the address of a server of vLLM, with its port and without a path."
            ) from None
        card = next(card for card in cards if card.get("parent") is None)
        return str(card["id"]), card.get("max_model_len")

    def load(self, adapter: Published) -> None:
        """Under its own name, from its own path; a server that has it already keeps it."""
        try:
            self._send("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.path)})
        except NoReply as failure:
            if "already been loaded" not in str(failure):
                raise _remedied(failure, self.url, adapter) from None

    def unload(self, adapter: Published, timeout_s: float = QUICK_S) -> None:
        """A server that has been started again does not know it, and needs not."""
        try:
            self._send("/v1/unload_lora_adapter", {"lora_name": adapter.name}, timeout_s)
        except NoReply as failure:
            if failure.status != 404:
                raise

    def forget(self) -> None:
        """What was computed with other weights."""
        self._send("/reset_prefix_cache", {})

    def _json(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            return json.loads(self._send(path, body, timeout_s))
        except (ValueError, RecursionError):
            raise Lie(f"{self.url}{path}: the reply is no JSON") from None

    def _send(self, path: str, body: Mapping[str, Any] | None, timeout_s: float = QUICK_S) -> bytes:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            return exchange(f"{self.url}{path}", body, timeout_s, LARGEST_REPLY, headers, direct=True)
        except NoReply as failure:
            if self.process is not None:
                self.process.check()
            remedy = f" (set {KEY} to the key of this server)" if failure.status in (401, 403) else ""
            raise failure.said(f"{self.url}: {failure}{remedy}") from None


def _remedied(failure: NoReply, url: str, adapter: Published) -> Exception:
    """What to do about an adapter that a server does not take; the failure itself where waiting may help."""
    said = str(failure)
    if failure.status == 404 and "No adapter found" not in said:
        return ConfigError(
            f"rollout.vllm.urls={url}: the server takes no adapters while it runs. Start it with --enable-lora "
            "and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment."
        )
    if failure.status == 404:
        return ConfigError(
            f"rollout.vllm.urls={url}: the server cannot see {adapter.path}. Put the run folder (run.dir) on a file "
            "system that both machines mount at the same place."
        )
    if "max_lora_rank" in said:
        return ConfigError(
            f"rollout.vllm.urls={url}: {said.partition('failed: ')[2][:80]} Start it with a --max-lora-rank that holds "
            "the adapter, or write a smaller lora.r."
        )
    if "LoRA is not enabled" in said:
        return ConfigError(f"rollout.vllm.urls={url}: the server takes no adapters. Start it with --enable-lora.")
    if failure.again and "add_lora" not in said:
        return failure
    return ConfigError(
        f"rollout.vllm.urls={url}: the server does not take the adapter. Does it serve the model of this run? {said}"
    )


class Lie(NoReply):
    """An answer that is not what was asked for."""


def understood(work: Callable[[], T], url: str) -> T:
    """Whatever a program answers that is not vLLM: reading it as an answer of vLLM goes wrong in one of these ways."""
    try:
        return work()
    except OctetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise Lie(f"{url}: the reply is not one of vLLM ({type(error).__name__}: {error})") from None


class Patience:
    """Waits for a server that is away, and says so; after `wait_s` that is the end."""

    def __init__(self, settings: Vllm, say: Say, stop: threading.Event) -> None:
        self.settings = settings
        self._stop = stop
        self._say = say
        self._began: float | None = None
        self._lies = 0

    def until_it_works(self, work: Callable[[], T], url: str) -> T:
        while True:
            try:
                return understood(work, url)
            except NoReply as failure:
                self.after(failure)

    def after(self, failure: NoReply) -> None:
        """Between two tries."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        away_s = now - self._began
        self._lies += isinstance(failure, Lie)
        if reason := self._why_not_again(failure, away_s):
            raise TrainingError(f"rollout.engine=vllm_server: {failure}. {reason}")
        if away_s > SAYS_EVERY_S:
            self._say(f"waiting for vLLM since {away_s:.0f} s: {failure}")
        self._stop.wait(min(LONGEST_PAUSE_S, 0.1 + away_s / 4))

    def _why_not_again(self, failure: NoReply, away_s: float) -> str | None:
        if self._stop.is_set():
            return "Sampling was stopped."
        if not failure.again:
            return "It would say the same again; its log says more."
        if self._lies >= LIES_ALLOWED:
            return (
                f"So were {self._lies} answers in a row. Is it vLLM itself that answers, and of a version that works?"
            )
        if away_s > self.settings.wait_s:
            return (
                f"It was waited for {away_s:.0f} s (rollout.vllm.wait_s={self.settings.wait_s:g}). Look into the log "
                "of the server; when it runs, --resume goes on from the last checkpoint."
            )
        return None


def now_and_then(say: Say) -> Say:
    """Many groups wait for the same server, and one of them says so."""
    saying, said = threading.Lock(), -math.inf

    def say_sometimes(text: str) -> None:
        nonlocal said
        with saying:
            if time.monotonic() - said > SAYS_EVERY_S:
                said = time.monotonic()
                say(text)

    return say_sometimes


class VllmServerSampler(Sampler):
    """Asks `settings.vllm.urls`, group by group. What a server cannot sample yet waits there: it knows its memory."""

    def __init__(self, run: Outside, servers: Sequence[Server]) -> None:
        self.settings, self.source, self.tokenizer = run.config.rollout, run.source, run.tokenizer
        self.stop_tokens = sorted(run.stop_tokens)
        self.servers = servers
        self.publisher = Publisher(run.folder / "published")
        self.adapter: Published | None = None
        self._say = now_and_then(run.say)
        self._stop = threading.Event()
        for server in servers:
            server.base, server.context = distributed.on_main(partial(self._patiently, server.look, server))

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        return self.frozen().sample(prompts, sampling)

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Every rank calls it with the longest prompt that there is. The servers know their memory themselves."""
        if refusal := _too_long(self.servers, prompts, sampling.max_new_tokens):
            raise refusal.of_all()

    def frozen(self) -> Sampler:
        return Frozen(self, self.sync(), self.servers)

    def each(self) -> Mapping[str, Sampler]:
        adapter = self.sync()
        return {f"sampler {server.url}": Frozen(self, adapter, [server]) for server in self.servers}

    def sync(self) -> Published | None:
        """Every rank calls it. Once for each version: rank 0 hands it to the servers, all ranks ask for it."""
        version, before = self.source.version, self.adapter
        if version is None:
            return None
        if before is None or before.version != version:
            self.adapter = adapter = self.publisher.publish(self.source, version)
            distributed.on_main(lambda: self._hand_over(adapter, before))
        return self.adapter

    def check(self, run: Outside) -> None:
        """What the servers say of themselves. Every rank calls it; rank 0 asks."""
        tokens = run.tokenizer("What is 12 + 30?")["input_ids"]
        for server in self.servers:
            look = partial(check_server, server, server.base, tokens, run.config.lora, run.say)
            distributed.on_main(partial(self._patiently, look, server))

    def close(self) -> None:
        """The files first: a server that is silent keeps nobody from deleting them."""
        self._stop.set()
        self.publisher.close()
        for server in self.servers if distributed.is_main() else []:
            if server.process is not None:
                server.process.stop()
            elif self.adapter is not None:
                with suppress(NoReply):  # a server that is away has forgotten it
                    server.unload(self.adapter, LAST_S)

    def _hand_over(self, adapter: Published, before: Published | None) -> None:
        for server in self.servers:
            self._patiently(partial(server.load, adapter), server)
            if before is not None:
                self._patiently(partial(server.unload, before), server)

    def _patiently(self, work: Callable[[], T], server: Server) -> T:
        return Patience(self.settings.vllm, self._say, self._stop).until_it_works(work, server.url)

    def groups(
        self, adapter: Published | None, servers: Sequence[Server], prompts: Sequence[Prompt], sampling: Sampling
    ) -> Iterator[tuple[int, list[Completion]]]:
        if refusal := _too_long(servers, prompts, sampling.max_new_tokens):
            raise refusal
        ask = partial(self._group, adapter, servers, sampling)
        return threads.each([partial(ask, *numbered) for numbered in enumerate(prompts)], OPEN * len(servers))

    def _group(
        self, adapter: Published | None, servers: Sequence[Server], sampling: Sampling, index: int, prompt: Prompt
    ) -> list[Completion]:
        """From a server in turn; another try goes to the next one."""
        patience, tries = Patience(self.settings.vllm, self._say, self._stop), 0
        while True:
            server = servers[(index + tries) % len(servers)]
            body = self._body(index, prompt, adapter.name if adapter else server.base, sampling)
            try:
                reply = server.post("/v1/completions", body, self.settings.vllm.timeout_s)
                return self._completions(reply, server, adapter, sampling)
            except NoReply as failure:
                tries += 1
                if failure.status == 404 and adapter is not None:  # it was started again
                    patience.until_it_works(partial(server.load, adapter), server.url)
                    failure = Lie(str(failure))  # not for ever
                patience.after(failure)

    def _body(self, index: int, prompt: Prompt, model: str, sampling: Sampling) -> dict[str, Any]:
        return NEUTRAL | {
            "model": model,
            "prompt": list(prompt.tokens),
            "n": sampling.group,
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": seed_of(sampling.seed, index),
            "stop_token_ids": self.stop_tokens,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def _completions(
        self, reply: Any, server: Server, adapter: Published | None, sampling: Sampling
    ) -> list[Completion]:
        wanted = adapter.name if adapter else server.base
        try:
            model, choices = reply["model"], sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            rows = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        except (LookupError, TypeError, ValueError):
            raise Lie(f"{server.url}: the reply has no token ids with their log-probs") from None
        if model != wanted:
            raise TrainingError(
                f"rollout.vllm.urls={server.url}: asked for {wanted}, it answered as {model}. A program between the "
                "trainer and vLLM changes the model; name the server itself."
            )
        if [choice["index"] for choice in choices] != list(range(sampling.group)):
            raise Lie(f"{server.url}: {len(choices)} answers, not {sampling.group}")
        return [self._completion(*row, server, adapter, sampling) for row in rows]

    def _completion(
        self, tokens: Any, logprobs: Any, server: Server, adapter: Published | None, sampling: Sampling
    ) -> Completion:
        if not _are_numbers(tokens, int) or not _are_numbers(logprobs, float) or len(tokens) != len(logprobs):
            raise Lie(f"{server.url}: an answer whose tokens and log-probs do not belong together")
        truncated = tokens[-1] not in self.stop_tokens
        if truncated and len(tokens) < sampling.max_new_tokens:
            raise Lie(f"{server.url}: an answer that ends after {len(tokens)} tokens without a stop token")
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        version = adapter.version if adapter else None
        return Completion(tuple(tokens), tuple(map(float, logprobs)), text, truncated, version)


class WholeModelSampler(VllmServerSampler):
    """Hands over all weights after each update, to servers that the run started: they have the route for it."""

    def __init__(self, run: Outside, servers: Sequence[Server]) -> None:
        super().__init__(run, servers)
        self._shown: int | None = None  # a server starts with the base

    def sync(self) -> Published | None:
        version = self.source.version
        if version != self._shown:
            published = self.publisher.publish(self.source, version)
            distributed.on_main(lambda: self._hand_weights_over(published))
            self._shown = version
            self.weights = replace(published, name=self.servers[0].base)  # the run has named them all alike
        return None if version is None else self.weights

    def _hand_weights_over(self, published: Published) -> None:
        for server in self.servers:
            self._patiently(partial(_send_weights, server, published), server)


def _send_weights(server: Server, published: Published) -> None:
    arguments = [str(published.path), published.version]
    answer = server.post("/collective_rpc", {"method": "octet_load", "args": arguments}, LONG_S)
    if set(answer["results"]) != {str(published.version)}:  # of every worker
        raise TrainingError(f"rollout.engine=vllm_server: {server.url} did not take the weights: {answer}")
    server.forget()


class Frozen(Sampler):
    """One version of the policy, or the base, of some of the servers."""

    def __init__(self, sampler: VllmServerSampler, adapter: Published | None, servers: Sequence[Server]) -> None:
        self.sampler = sampler
        self.adapter = adapter
        self.servers = servers

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        return self.sampler.groups(self.adapter, self.servers, prompts, sampling)


def connect(run: Outside) -> VllmServerSampler:
    """To the servers of the settings, or to those that are started now. Every rank calls it."""
    settings = run.config.rollout.vllm
    started = vllm_process.start(run) if settings.start else []
    try:
        urls = settings.urls or distributed.gather([process.url for process in started])[0]
        processes: Sequence[Started | None] = started or [None] * len(urls)
        kind = VllmServerSampler if run.config.lora.enabled else WholeModelSampler
        sampler = kind(run, [Server(*pair) for pair in zip(urls, processes, strict=True)])
        sampler.check(run)
    except BaseException:
        for process in started:
            process.stop()
        raise
    run.say(f"rollout: vLLM at {', '.join(urls)}")
    return sampler


def _too_long(servers: Sequence[Server], prompts: Sequence[Prompt], new_tokens: int) -> ConfigError | None:
    """An error where one of the servers has no room for the longest prompt with its answer."""
    longest = max((len(prompt.tokens) for prompt in prompts), default=0)
    for server in servers:
        if server.context is not None and longest + new_tokens > server.context:
            return ConfigError(
                f"rollout.max_new_tokens={new_tokens}: with a prompt of {longest} tokens that is beyond what "
                f"{server.url} has room for, {server.context}. Start it with a larger --max-model-len, or "
                "write a smaller rollout.max_new_tokens or prompt.max_tokens."
            )
    return None


def _are_numbers(values: Any, kind: type) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return (
        isinstance(values, list)
        and bool(values)
        and all(type(value) in kinds and math.isfinite(value) for value in values)
    )
