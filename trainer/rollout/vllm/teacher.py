"""A vLLM server as teacher: the log-probs of answers that the policy has sampled.

A request sends a prompt and its answer as one prompt of token ids. vLLM returns the log-probs of a prompt at
temperature 1, whatever the request says, and samples one more token, which is not used.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainer.config.settings import Config
from trainer.errors import ConfigError, ModelError
from trainer.machine import threads
from trainer.ranks import distributed
from trainer.records import TrainingBatch
from trainer.rollout.limits import Say
from trainer.rollout.vllm.client import Retry, Server, rate_limited
from trainer.rollout.vllm.server import OPEN_REQUESTS

T = TypeVar("T")

ROUNDING = 1e-3  # log-probs may exceed 0 by this much


class ServedTeacher:
    """Gets the log-probs of each row from the server at `teacher.url`, with many requests at a time."""

    def __init__(self, config: Config, tokenizer: Any, longest_prompt: int, say: Say) -> None:
        """Check the model, context length and vocabulary of the server, and raise if one is wrong. Every rank calls
        this; rank 0 sends the requests."""
        self.settings, self._say = config.rollout.vllm, rate_limited(say)
        self.server = Server(str(config.teacher.url), setting="teacher.url")
        describe = partial(self.server.describe, config.teacher.name)
        self.model, self.server.max_model_len = distributed.on_main(partial(self._retry, describe, begins=True))
        if config.task.agent:  # whose conversations grow
            longest_prompt = config.prompt.max_tokens
        new_tokens, context = config.rollout.max_new_tokens, self.server.max_model_len
        wanted = longest_prompt + new_tokens + 1  # vLLM samples one
        if context is not None and wanted > context:
            reason = f"with a prompt of {longest_prompt} tokens this exceeds the context of the teacher, {context}"
            smaller = "write a smaller rollout.max_new_tokens or prompt.max_tokens"
            remedy = f"Start it with --max-model-len {wanted} or more, or {smaller}"
            raise ConfigError(f"rollout.max_new_tokens={new_tokens}", reason, remedy).of_all()
        distributed.on_main(partial(self._refuse_other_tokens, tokenizer, config.model.name))

    def __call__(self, batches: Sequence[TrainingBatch]) -> list[Tensor]:
        rows = [[*row.prompt, *row.completion] for batch in batches for row in batch.rows]
        replies = dict(threads.each([partial(self._retry, partial(self._ask, row)) for row in rows], OPEN_REQUESTS))
        in_order, tensors = iter(replies[index] for index in range(len(rows))), []
        for batch in batches:
            logprobs_BT = torch.zeros(batch.mask_BT.shape)
            for logprobs_T, logprobs in zip(logprobs_BT, in_order):
                logprobs_T[: len(logprobs)] = torch.tensor(logprobs)
            tensors.append(logprobs_BT.to(batch.mask_BT.device).where(batch.mask_BT, 0.0))
        return tensors

    def _retry(self, request: Callable[[], T], begins: bool = False) -> T:
        retry = Retry(self.settings, self._say, threading.Event(), self.server.where, begins)  # the event is never set
        return retry.call(request, self.server.url)

    def _ask(self, row: Sequence[int]) -> list[float]:
        """Return the log-probs of the tokens of a row, from the second on."""
        body = {"model": self.model, "prompt": row, "max_tokens": 1, "prompt_logprobs": 0}
        reply = self.server.ask("/v1/completions", body, self.settings.timeout_s)
        self.server.must_be(self.model, reply["model"])
        (choice,) = reply["choices"]
        _, *pairs = zip(choice["prompt_logprobs"], row, strict=True)  # the first token has no log-prob
        logprobs = [float(candidates[str(token)]["logprob"]) for candidates, token in pairs]
        if not all(isfinite(one) and one < ROUNDING for one in logprobs):
            remedy = "Start it without --logprobs-mode, or with processed_logprobs"
            raise ConfigError(self.server.where, f"{max(logprobs):g} is not a log-prob", remedy)
        return logprobs

    def _refuse_other_tokens(self, tokenizer: Any, name: str) -> None:
        """Raise ModelError if the server decodes the vocabulary to another text, apart from spaces."""
        tokens = sorted(tokenizer.get_vocab().values())
        ask = partial(self.server.ask, "/detokenize", {"model": self.model, "tokens": tokens})
        theirs = "".join(self._retry(lambda: str(ask()["prompt"]), begins=True).split(" "))
        ours = "".join(tokenizer.decode(tokens).split(" "))
        if theirs != ours:
            reason = f"its tokenizer has another vocabulary than that of the model, {name}"
            raise ModelError(self.server.where, reason, "Take a teacher of the same family")
