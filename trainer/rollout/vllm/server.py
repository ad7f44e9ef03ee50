"""rollout with vLLM servers: token ids and log-probs over HTTP. After each update the servers load only the adapter, or
the weights of a whole model if the run has started them with `vllm_worker.py`.

A request asks for one group. The reply has to come from the requested version, and contain the complete group, where
each answer ends with a stop token or string or has the maximum length. Otherwise the request is repeated, or the run
ends. If a server does not answer, the run waits for it; if it has been restarted without the adapter, the adapter is
loaded again.
"""

import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from trainer.machine import threads
from trainer.machine.http_client import NoReply, read_key
from trainer.ranks import distributed
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.interface import Groups, Sampler, SamplingContext
from trainer.rollout.limits import check_context
from trainer.rollout.turns import OpenAnswer, Written
from trainer.rollout.vllm import process
from trainer.rollout.vllm.client import KEY, InvalidReply, Retry, Server, rate_limited
from trainer.rollout.vllm.process import ServerProcess, turn_options
from trainer.rollout.vllm.publish import Published, Publisher

T = TypeVar("T")
Body = dict[str, Any]  # the JSON of a request

OPEN_REQUESTS = 128  # a rank has at most this many at each server, which would only queue more
LEAST = -(1 << 31)  # smaller than any log-prob
UNLOAD_S = 5.0  # timeout at the end of the run, when nothing depends on it


class VllmServerSampler(Sampler):
    """Sends one request per group to the servers, which queue the requests that do not fit into their memory."""

    owns_copy = True

    def __init__(self, context: SamplingContext, servers: Sequence[Server]) -> None:
        self.context, self.settings, self.servers = context, context.config.rollout.vllm, servers
        self.turns = context.turns
        self.publisher = Publisher(context.folder / "published")
        self.is_whole = not context.config.lora.enabled
        self.published: Published | None = None  # the version on the servers, which start with the base model
        self._say = rate_limited(context.say)
        self._stop = threading.Event()
        for server in servers:
            first = partial(self._retry, server.describe, server, begins=server.process is None)
            server.base, server.max_model_len = distributed.on_main(first)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        return self.frozen().sample(prompts, sampling)

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Raise ConfigError if the context of a server is too short for the longest prompt. Every rank calls it."""
        distributed.on_main(partial(_check_context, self.servers, prompts, sampling))

    def context_limit(self) -> int | None:
        return min((server.max_model_len for server in self.servers if server.max_model_len), default=None)

    def frozen(self) -> Sampler:
        return FrozenSampler(self, self.sync(), self.servers)

    def each(self) -> Mapping[str, Sampler]:
        adapter = self.sync()
        return {f"sampler {server.url}": FrozenSampler(self, adapter, [server]) for server in self.servers}

    def sync(self) -> Published | None:
        """Publish the current version of the policy if it is new, and return it. Return None for the base model: a
        server has it besides its adapters, and loads it again if the whole model is trained. Every rank calls it."""
        version, before = self.context.policy.version, self.published
        is_new = version != (before and before.version)
        if is_new and (version is not None or self.is_whole):
            self.published = published = self.publisher.publish(self.context.policy, version)
            distributed.on_main(lambda: self._replace(before, published))
        return None if version is None else self.published

    def _replace(self, before: Published | None, published: Published) -> None:
        for server in self.servers:
            load = server.load_weights if self.is_whole else server.load_adapter
            self._retry(partial(load, published), server)
            if before is not None and not self.is_whole:
                self._retry(partial(server.unload_adapter, before), server)

    def check(self) -> None:
        """Raise ConfigError if the settings of a server cannot work. Every rank calls it."""
        for server in self.servers:
            check = partial(server.check, self.context.config.lora, self.context.say)
            distributed.on_main(partial(self._retry, check, server))

    def close(self) -> None:
        self._stop.set()
        self.publisher.close()  # before the requests below, which may time out
        for server in self.servers if distributed.is_main() else []:
            if server.process is not None:
                server.process.stop()
            elif self.published is not None:
                with suppress(NoReply):  # the server may have ended
                    server.unload_adapter(self.published, UNLOAD_S)

    def _retry(self, request: Callable[[], T], server: Server, begins: bool = False) -> T:
        return Retry(self.settings, self._say, self._stop, begins=begins).call(request, server.url)

    def group(
        self, adapter: Published | None, servers: Sequence[Server], sampling: Sampling, index: int, prompt: Prompt
    ) -> list[Completion]:
        """Return a group. One request samples all first turns; each later turn has its own request."""
        ask, version = partial(self._ask, adapter, servers, index), adapter.version if adapter else None

        def finished(answer: OpenAnswer, turn: Written) -> Completion:
            """Return the complete answer that begins with this turn."""
            while True:
                if completion := self.turns.add(answer, *turn, version) or self.turns.take_reply(answer):
                    return completion
                (turn,) = ask(self._body(answer, sampling, 1))

        dialogues = [self.turns.begin(prompt, number, sampling) for number in range(sampling.group)]
        begun = ask(self._body(dialogues[0], sampling, sampling.group))
        work = [partial(finished, *pair) for pair in zip(dialogues, begun, strict=True)]
        if self.turns.environments is None:
            return [finish() for finish in work]
        return [completion for _, completion in sorted(threads.each(work, len(work)), key=lambda done: done[0])]

    def _ask(self, adapter: Published | None, servers: Sequence[Server], index: int, body: Body) -> list[Written]:
        """Send a request to one server after another until one of them answers."""
        retry, tries = Retry(self.settings, self._say, self._stop), 0
        while True:
            server = servers[(index + tries) % len(servers)]
            body["model"] = adapter.name if adapter and not self.is_whole else server.base
            try:
                reply = server.ask("/v1/completions", body, self.settings.timeout_s)
                return self._written(reply, server, body)
            except NoReply as failure:
                tries += 1
                if failure.status == 404 and adapter and not self.is_whole:  # the server has been restarted
                    retry.call(partial(server.load_adapter, adapter), server.url)
                    failure = InvalidReply(str(failure))  # these are counted, so that the loop ends
                retry.wait(failure)

    def _body(self, answer: OpenAnswer, sampling: Sampling, count: int) -> Body:
        """Return a request for the next turn of an answer, or for the first turns of a group."""
        options = turn_options(self.context, answer, sampling, count)
        return options | {"prompt": list(answer.context), "return_token_ids": True}

    def _written(self, reply: Any, server: Server, body: Body) -> list[Written]:
        url = server.url
        try:
            model, choices = reply["model"], sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            rows = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
        except (LookupError, TypeError, ValueError, OverflowError):
            raise InvalidReply(f"{url}: the reply has no token ids with their log-probs") from None
        server.must_be(body["model"], model)
        if [choice["index"] for choice in choices] != list(range(body["n"])):
            raise InvalidReply(f"{url}: {len(choices)} answers, not {body['n']}")
        for tokens, logprobs in rows:
            are_tokens = _are_numbers(tokens, (int,), -1, self.context.vocabulary)
            if not are_tokens or not _are_numbers(logprobs, (int, float), LEAST, 1):  # 0, and how far it may be rounded
                raise InvalidReply(f"{url}: an answer has tokens or log-probs that this model cannot have")
            if not 0 < len(tokens) == len(logprobs) <= body["max_tokens"]:
                sizes = f"{len(tokens)} tokens of at most {body['max_tokens']}, and {len(logprobs)} log-probs"
                raise InvalidReply(f"{url}: an answer has {sizes}")
            if self.turns.stops.completion(tokens, logprobs).truncated and len(tokens) < body["max_tokens"]:
                raise InvalidReply(f"{url}: an answer ends after {len(tokens)} tokens without a stop token or string")
        return [(tokens, [float(one) for one in logprobs]) for tokens, logprobs in rows]


@dataclass(frozen=True)
class FrozenSampler(Sampler):
    """Samples from one version of the policy, or from the base model, with some of the servers."""

    sampler: VllmServerSampler
    adapter: Published | None
    servers: Sequence[Server]

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups:
        _check_context(self.servers, prompts, sampling)
        ask = partial(self.sampler.group, self.adapter, self.servers, sampling)
        requests = [partial(ask, *numbered) for numbered in enumerate(prompts, distributed.rank())]
        return threads.each(requests, OPEN_REQUESTS * len(self.servers))

    def context_limit(self) -> int | None:
        return self.sampler.context_limit()


def connect(context: SamplingContext) -> VllmServerSampler:
    """Connect to the servers in the settings, or start servers. Every rank calls it."""
    settings = context.config.rollout.vllm
    if settings.start:  # servers and ranks read the key from the environment, so no file, log or command line has it
        os.environ[KEY] = distributed.gather(read_key(KEY) or secrets.token_urlsafe(32))[0]
    started = process.start(context) if settings.start else []
    for server in started:  # also if the run cannot be built; from Python the trainer's process goes on
        distributed.before_disconnect(server.stop)
    urls = settings.urls or distributed.gather([server.url for server in started])[0]
    processes: Sequence[ServerProcess | None] = started or [None] * len(urls)
    sampler = VllmServerSampler(context, [Server(*pair) for pair in zip(urls, processes, strict=True)])
    sampler.check()
    context.say(f"rollout: vLLM at {', '.join(urls)}")
    return sampler


def _check_context(servers: Sequence[Server], prompts: Sequence[Prompt], sampling: Sampling) -> None:
    for server in servers:
        check_context(server.max_model_len, prompts, sampling.max_new_tokens, server.url)


def _are_numbers(values: Any, kinds: tuple[type, ...], below: int, above: int) -> bool:
    """Return True for a list of numbers that are all larger than `below` and smaller than `above`."""
    return isinstance(values, list) and all(type(one) in kinds and below < one < above for one in values)
