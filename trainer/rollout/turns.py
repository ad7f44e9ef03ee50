"""rollout: where a turn ends, and answers of several turns.

    prompt | turn of the model | reply of the environment | turn of the model | ...

The tokens of the model stay as they were sampled. A reply is tokenised once, and is never decoded or trained on.
Environments reply in threads, during the sampling. The inline calculator replies without one, because a thread would
take longer than the calculation.
"""

import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from functools import partial
from typing import Any

from trainer.config.settings import Turns
from trainer.errors import DataError, TrainingError
from trainer.machine import threads
from trainer.problem.environment import Environment, Reply
from trainer.problem.prompts import Prompter, left_out_of_texts
from trainer.problem.tools import MOST_CALLS
from trainer.records import Completion, Prompt, Sampling, Turn

PATIENCE_S = 2.0  # how long to wait for quick replies, so that rows continue in the same order in every run
SLOW_S, SLOW_TIMES = 0.2, 8  # after this many waits of this length, no environment counts as quick any more
MARGIN = 4  # more tokens to decode, because the first token of a window may be decoded without its space
BYTES_PER_TOKEN = 16  # only this many characters of a reply are tokenised for each token that it may have

Written = tuple[list[int], list[float]]  # the tokens of a turn, and their log-probs


class Stops:
    """The tokens and the strings that end an answer, whichever comes first."""

    def __init__(self, tokenizer: Any, tokens: Sequence[int], strings: Sequence[str] = ()) -> None:
        self.tokenizer = tokenizer
        self.tokens = frozenset(tokens)
        self.strings = strings
        self._left_out = left_out_of_texts(tokenizer)
        # A string has at most as many tokens as bytes.
        self.window = MARGIN + max((len(string.encode()) for string in strings), default=0)

    def also(self, strings: Sequence[str]) -> "Stops":
        return Stops(self.tokenizer, sorted(self.tokens), (*self.strings, *strings)) if strings else self

    def is_in(self, tokens: Sequence[int]) -> bool:
        """Return True if the text of the tokens contains a stop string."""
        text = self.text(tokens) if self.strings else ""
        return any(string in text for string in self.strings)

    def completion(self, tokens: Sequence[int], logprobs: Sequence[float], version: int | None = None) -> Completion:
        """Return the answer up to its first stop token, or up to the token that completes its first stop string. Its
        text includes the stop string, unless that starts with a line break, because then it opens the next section."""
        stop = next((at for at, token in enumerate(tokens, 1) if token in self.tokens), None)
        tokens, truncated = tokens[:stop], stop is None
        text = self.text(tokens)
        if ends := [(text.index(string) + len(string), string) for string in self.strings if string in text]:
            end, string = min(ends)
            kept = bisect_left(range(len(tokens)), True, key=lambda count: self.is_in(tokens[:count]))
            tokens, truncated = tokens[:kept], False
            text = text[: end - len(string) if string.startswith("\n") else end]
        return Completion(tuple(tokens), tuple(logprobs[: len(tokens)]), text, truncated, version)

    def text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token not in self._left_out])


class OpenAnswer:
    """An answer that is being written, and its environment."""

    def __init__(self, prompt: Prompt, number: int, most: int, end: int, stops: Stops, index: int = 0) -> None:
        self.prompt, self.number, self.stops = prompt, number, stops
        self.index = index  # of the prompt
        self.uniforms: Sequence[float] = ()  # the random numbers of its tokens, in Octet's decoder
        self.most, self.end = most, end  # maximum length of the answer, in all and at the end of this turn, in tokens
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.written: list[bool] = []
        self.turns: list[Turn] = []
        self.reward = 0.0
        self.version: int | None = None
        self.environment: Environment | None = None
        self.reply: Future[Reply] | None = None
        self.deadline = 0.0

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt.tokens, *self.tokens)

    def add_turn(self, turn: Completion) -> None:
        self.tokens += turn.tokens
        self.logprobs += turn.logprobs
        self.written += [True] * len(turn.tokens)
        self.turns.append(Turn("model", turn.text))
        self.version = turn.version if self.version is None else self.version

    def add_reply(self, tokens: Sequence[int], text: str) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.written += [False] * len(tokens)
        self.turns.append(Turn("environment", text))

    def completion(self, truncated: bool) -> Completion:
        """Return the complete answer, with the text of its last turn."""
        written = () if all(self.written) else tuple(self.written)
        tokens, logprobs, text = tuple(self.tokens), tuple(self.logprobs), self.turns[-1].text
        return Completion(tokens, logprobs, text, truncated, self.version, written, tuple(self.turns), self.reward)


class TurnTaking:
    """Ends an answer with its first turn, or has an environment reply and lets the model write another turn."""

    def __init__(self, stops: Stops, prompter: Prompter | None = None, limits: Turns | None = None) -> None:
        self.stops = stops
        self.limits = limits or Turns()
        self.prompter = prompter
        self.environments = prompter.environments if prompter else None
        self._slow = 0

    def begin(self, prompt: Prompt, number: int, sampling: Sampling, index: int = 0) -> OpenAnswer:
        most = prompt.most_tokens(sampling.max_new_tokens)
        return OpenAnswer(prompt, number, most, self.token_limit(0, most), self.stops.also(prompt.stop), index)

    def token_limit(self, begun: int, most: int) -> int:
        """Return how many tokens an answer may have at the end of a turn that begins after `begun` tokens."""
        if self.environments is None or self.limits.tokens is None:
            return most
        return min(most, begun + self.limits.tokens)

    def add(
        self, dialogue: OpenAnswer, tokens: Sequence[int], logprobs: Sequence[float], version: int | None = None
    ) -> Completion | None:
        """Add a turn. Return the complete answer if it ends here, or None if its environment will reply."""
        turn = self.stops.completion(tokens, logprobs, version)
        if self.environments is None:
            return turn
        dialogue.add_turn(turn)
        if turn.truncated:
            return self._ended(dialogue, truncated=True)
        calls = MOST_CALLS + 1 if self.environments.has_tools else 1  # each has this limit, and so has get_reward()
        seconds = threading.TIMEOUT_MAX if self.environments.is_built_in else calls * self.limits.seconds
        dialogue.deadline = time.monotonic() + seconds
        reply = partial(self._reply, dialogue, turn.text)
        if self.environments.is_inline:
            dialogue.reply = Future()
            dialogue.reply.set_result(reply())
        else:
            dialogue.reply = threads.begin(reply)
        return None

    def take_reply(self, dialogue: OpenAnswer) -> Completion | None:
        """Wait for the reply. Return the complete answer if it ends here, or None if it continues after the reply."""
        assert self.environments is not None, "only environments reply"
        assert self.prompter is not None, "environments come from the prompter"
        assert dialogue.reply is not None, "`add` must have asked for a reply"
        try:
            text, done, reward = dialogue.reply.result(max(0.0, dialogue.deadline - time.monotonic()))
        except FutureTimeout:
            where = f"in an answer to {dialogue.prompt.problem.id}"
            reason = f"step() has not returned after {self.limits.seconds:g} seconds, {where}"
            remedy = "Make it faster, or write a larger rollout.turns.seconds"
            raise TrainingError(self.environments.setting, reason, remedy) from None
        dialogue.reply = None
        dialogue.reward += reward
        has_stopped = self.environments.is_inline and dialogue.tokens[-1] in self.stops.tokens
        if done or has_stopped:
            return self._ended(dialogue, truncated=False)
        text = self._cut(text)
        tokens = joined(self.stops, dialogue.tokens[-1], self.prompter.reply(dialogue.prompt.problem, text))
        turns = sum(turn.role == "model" for turn in dialogue.turns)
        if turns == self.limits.most or len(dialogue.tokens) + len(tokens) >= dialogue.most:
            return self._ended(dialogue, truncated=True)
        dialogue.add_reply(tokens, text)
        dialogue.end = self.token_limit(len(dialogue.tokens), dialogue.most)
        return None

    def answered(self, waiting: Sequence[OpenAnswer], others_running: bool) -> list[OpenAnswer]:
        """Return the answers that have got a reply, or are out of time. Wait a short time for all replies, so that rows
        continue in the same order in every run, and longer only if no other row is running."""
        began, nearest = time.monotonic(), min(dialogue.deadline for dialogue in waiting)
        replies = [dialogue.reply for dialogue in waiting if dialogue.reply]
        patience = PATIENCE_S if self._slow < SLOW_TIMES else 0.0
        if wait(replies, max(0.0, min(nearest - began, patience))).not_done and not others_running:
            wait(replies, max(0.0, nearest - time.monotonic()), FIRST_COMPLETED)
        now = time.monotonic()
        self._slow += now - began > SLOW_S
        return [one for one in waiting if one.deadline <= now or (one.reply is not None and one.reply.done())]

    def _reply(self, dialogue: OpenAnswer, text: str) -> Reply:
        """Return the reply of the environment to a turn. The environment is made at the first turn of an answer."""
        assert self.environments is not None, "only environments reply"
        prompt = dialogue.prompt
        problem = prompt.original or prompt.problem
        if len(dialogue.turns) == 1:
            dialogue.environment, asked = self.environments.begin(problem)
            first = prompt.problem.question
            if asked is not None and asked != first:
                reason = f"reset() for {problem.id} asked {first[:60]!r} first and {asked[:60]!r} now"
                remedy = "The answers of a group have one prompt: draw at random by the problem alone"
                raise DataError(self.environments.setting, reason, remedy)
        if dialogue.environment is None:
            return "", True, 0.0
        return self.environments.step(dialogue.environment, problem, text)

    def _ended(self, dialogue: OpenAnswer, truncated: bool) -> Completion:
        self._close(dialogue)
        answer = dialogue.completion(truncated)
        if self.environments is not None and self.environments.is_inline:  # the replies are parts of what it wrote
            return replace(answer, text="".join(turn.text for turn in answer.turns))
        return answer

    def abandon(self, dialogues: Sequence[OpenAnswer]) -> None:
        """Close the environments of answers that will be restarted, each after the reply that it is working on."""
        for dialogue in dialogues:
            if dialogue.reply:
                dialogue.reply.add_done_callback(partial(self._close, dialogue))
            else:
                self._close(dialogue)

    def _close(self, dialogue: OpenAnswer, *_: object) -> None:
        if self.environments:
            self.environments.close(dialogue.environment)
        dialogue.environment = None

    def _cut(self, text: str) -> str:
        """Return a reply without special tokens, cut to the maximum length, with a note if it was cut."""
        tokenizer: Any = self.stops.tokenizer
        text, most = without_special(self.stops, text), self.limits.observation
        if text.isascii() and len(text) < most:  # at most a token for each character, and one for a beginning
            return text
        beginning = text[: most * BYTES_PER_TOKEN]
        tokens = tokenizer(beginning, add_special_tokens=False)["input_ids"]
        if len(beginning) == len(text) and len(tokens) <= most:
            return text
        kept: str = tokenizer.decode(tokens[:most])
        return f"{kept} [cut: {len(kept)} of {len(text)} characters]"


def without_special(stops: Stops, text: str) -> str:
    """Return the text with special tokens and stop tokens broken up: a tool could end its turn, and begin another."""
    for index, token in stops.tokenizer.added_tokens_decoder.items():
        if token.special or index in stops.tokens:
            text = text.replace(token.content, f"{token.content[:1]} {token.content[1:]}")
    return text.encode(errors="replace").decode()


def joined(stops: Stops, last: int, text: str) -> list[int]:
    """Return the tokens of the text after a turn, without a stop token that the turn already ends with."""
    tokens: list[int] = stops.tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens[1:] if tokens and last in stops.tokens and tokens[0] in stops.tokens else tokens
