"""The calls of an agent and the replies of the model in one answer, in the tokens that were sampled.

A call that begins with the messages of an earlier call and its reply continues that call: its tokens are those of the
earlier call, the reply as it was sampled, and then the new messages, or the text that the last message adds to a
truncated reply. Every other call begins a new segment. The first call that continues a reply extends its segment; a
second one, such as a parallel call, begins a segment whose prompt is the whole conversation so far. So every token that
the model wrote is trained on exactly once.
"""

import json
import secrets
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.errors import DataError
from trainer.problem.prompts import TURN, Prompter
from trainer.problem.tools import calls_in
from trainer.records import Completion, Prompt, Segment, Turn
from trainer.rollout.turns import OpenAnswer, Stops, joined, without_special

Message = dict[str, Any]
# OpenAI's roles, and their names in chat templates.
ROLES = {one: one for one in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
CALLED = ("name", "arguments")
LONGEST_TOKEN = 256  # characters; no vocabulary has a longer token


class Refused(Exception):
    """A call that is refused, with the fields of an error of OpenAI's API."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one answer: calls, tokens of a reply, tokens of a conversation, and seconds between two calls."""

    calls: int
    new_tokens: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call that was answered: its messages including the reply, and the tokens of all of them."""

    messages: list[Message]
    tokens: tuple[int, ...]
    segment: OpenAnswer
    cut: str  # the text that was sampled after the message of the reply: the stop string of the call
    tools: Sequence[Mapping[str, Any]]

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Return True if the messages of another call begin with those of this one, or extend its reply."""
        *before, reply = self.messages
        if not same(before, messages[: len(before)]) or len(messages) < len(self.messages):
            return False
        if messages[len(self.messages) :]:
            return same([reply], messages[len(before) :])
        return self.added(messages) is not None

    def added(self, messages: Sequence[Message]) -> str | None:
        """Return the text that the last message adds to the reply, or None if the messages do not end with it. Without
        an addition, the model writes on, unless it has already written a stop string."""
        *_, reply = self.messages
        last = messages[-1]
        adds = len(messages) == len(self.messages) and last["role"] == "assistant" and "tool_calls" not in reply
        if not (adds and last["content"].startswith(reply["content"])):
            return None
        text = str(last["content"].removeprefix(reply["content"]).removeprefix(self.cut))
        return text if text or not self.cut else None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that waits for the model."""

    conversation: "Conversation"
    prompt: Prompt
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    continued: Exchange | None
    new_tokens: tuple[int, ...]  # the end of the prompt, after the tokens of the exchange that it continues
    is_short: bool  # True if the agent asked for fewer tokens than the limits allow
    place: tuple[int, ...]  # sorts the calls of an answer, without depending on the order of parallel ones
    reply: "Future[Completion]" = field(default_factory=Future)


class Conversation:
    """All calls that an agent makes for one answer, possibly from several threads."""

    def __init__(
        self, prompter: Prompter, stops: Stops, prompt: Prompt, number: int, limits: Limits, index: int = 0
    ) -> None:
        self.prompter, self.stops, self.prompt, self.number, self.limits = prompter, stops, prompt, number, limits
        self.index = index  # the index of the prompt
        self.key = secrets.token_urlsafe(24)  # the API key of its agent
        self.deadline = 0.0  # when the next call is due
        self.pending = 0  # calls without a reply
        self.segments: list[tuple[tuple[int, ...], OpenAnswer]] = []  # each with the place of its first call
        self.calls = 0
        self.is_cut = False  # True once a limit has cut the answer
        self.is_rewritten = False  # True once a call has not continued an earlier one
        self.last = ""  # the text of the last reply
        self._exchanges: list[Exchange] = []
        self._asked: Counter[int] = Counter()
        self._lock = threading.Lock()

    def call(
        self, messages: list[Message], tools: Sequence[Any], most: int | None, strings: Sequence[str], count: int = 1
    ) -> Call:
        """Return a call for the sampler. Raise Refused if `count` equal calls would exceed a limit of the answer."""
        with self._lock:
            if self.calls + count > (allowed := self.limits.calls):
                self.is_cut = True
                reason = f"an answer has at most rollout.turns.most={allowed} calls, and this one has had {self.calls}"
                raise Refused(reason, 429, "too_many_calls", "n" if count > 1 else None)
            characters = sum(len(one["content"]) for one in messages)
            if characters > self.limits.context * LONGEST_TOKEN:  # which would take seconds to tokenize
                raise self._too_long(f"{characters} characters")
            continued = self._continued(messages, tools)
            new_tokens = self._new_tokens(messages, tools, continued)
            context = (*continued.tokens, *new_tokens) if continued else new_tokens
            room = min(self.limits.context - len(context), self.limits.new_tokens)
            if room < 1:
                raise self._too_long(f"{len(context)} tokens")
            digest = zlib.crc32(repr(context).encode())
            name = f"{self.prompt.problem.id}/{digest:08x}/{self._asked[digest]}"
            place = len(self._exchanges), digest, self._asked[digest]
            self._asked[digest] += 1
            self.calls += 1
        is_short = most is not None and most < room
        problem, limit = replace(self.prompt.problem, id=name), most if is_short else room
        prompt = Prompt(problem, "", context, self.prompt.repeat, self.prompt.place, most=limit, stop=(*strings,))
        return Call(self, prompt, messages, tools, continued, new_tokens, is_short, place)

    def answer(self, call: Call, sampled: Completion) -> tuple[Message, str, int]:
        """Record the reply to a call. Return its message, OpenAI's finish_reason and its number of tokens."""
        strings = call.prompt.stop  # which the message leaves out
        reply = self.stops.also(strings).completion(sampled.tokens, sampled.logprobs, sampled.version)
        shown = min((reply.text.partition(string)[0] for string in strings), key=len, default=reply.text)
        names = [tool["function"]["name"] for tool in call.tools]
        text, calls = calls_in(shown, [] if reply.truncated else names)  # a call that was cut off may lack arguments
        message: Message = {"role": "assistant", "content": text}
        if calls:
            functions = [{"name": name, "arguments": json.dumps(arguments or {})} for name, arguments in calls]
            message["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": one} for one in functions
            ]
        with self._lock:
            rest = self.stops.text(reply.tokens)[len(shown) :]  # a text leaves out strings that begin with a line break
            self._record(call, reply, message, next((one for one in strings if rest.startswith(one)), ""))
        if calls:
            return message | {"content": text or None}, "tool_calls", len(reply.tokens)
        return message, "length" if reply.truncated else "stop", len(reply.tokens)

    def completion(self, value: str | float | None, failed: bool) -> Completion:
        """Return the complete answer. Its text is the one that the agent returned, or the last reply of the model."""
        text = value if isinstance(value, str) else "" if failed else self.last
        reward = 0.0 if failed else value if isinstance(value, float) else None
        whole = OpenAnswer(self.prompt, self.number, 0, 0, self.stops)
        opened = [one for _, one in sorted(self.segments, key=lambda segment: segment[0])]
        for one in opened:
            whole.tokens += one.tokens
            whole.logprobs += one.logprobs
            whole.written += one.written
            whole.turns += one.turns
            whole.version = one.version if whole.version is None else whole.version
        if not whole.turns:
            return Completion((), (), text, self.is_cut, reward=reward)
        segments = tuple(
            Segment(one.prompt.tokens, tuple(one.tokens), tuple(one.logprobs), tuple(one.written)) for one in opened
        )
        return replace(whole.completion(self.is_cut), text=text, reward=reward, segments=segments)

    def _too_long(self, size: str) -> Refused:
        self.is_cut = True
        reason = f"the conversation has {size}, and with an answer it may have {self.limits.context} tokens"
        return Refused(reason, code="context_length_exceeded", param="messages")

    def _continued(self, messages: list[Message], tools: Sequence[Mapping[str, Any]]) -> Exchange | None:
        """Return the longest exchange with these tools that the messages continue, or None."""
        candidates = [one for one in self._exchanges if one.tools == tools and one.is_continued_by(messages)]
        if messages[-1]["role"] == "assistant":  # a turn that ends with a stop token cannot be extended
            candidates = [one for one in candidates if one.tokens[-1] not in self.stops.tokens]
        self.is_rewritten |= bool(self._exchanges) and not candidates
        return max(candidates, key=lambda one: len(one.messages), default=None)

    def _new_tokens(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]], continued: Exchange | None
    ) -> tuple[int, ...]:
        """Return the tokens of the messages, without those of the exchange that they continue."""
        tokenizer = self.stops.tokenizer
        safe, tools = json.loads(without_special(self.stops, json.dumps([messages, tools], ensure_ascii=False)))
        for function in (made["function"] for one in safe for made in one.get("tool_calls", ())):
            with suppress(ValueError, TypeError, RecursionError):  # chat templates want arguments as values, not JSON
                function["arguments"] = json.loads(function["arguments"])
        try:
            if continued is None:
                return self.prompter.tokens(self.prompter.conversation(safe, tools), bool(tokenizer.chat_template))
            if (added := continued.added(messages)) is not None:
                return tuple(tokenizer(without_special(self.stops, added), add_special_tokens=False)["input_ids"])
            turn = TURN
            while any(turn in one["content"] for one in safe):
                turn += "-"
            safe[len(continued.messages) - 1] = {"role": "assistant", "content": turn}
            text = self.prompter.conversation(safe, tools).rpartition(turn)[2]
        except DataError as error:
            raise Refused(str(error), param="messages") from None
        return tuple(joined(self.stops, continued.tokens[-1], text))

    def _record(self, call: Call, reply: Completion, message: Message, cut: str) -> None:
        before, texts = call.continued, [one["content"] for one in call.messages]
        if before is not None:
            added = before.added(call.messages)
            texts = texts[len(before.messages) :] if added is None else [added]
        if before is not None and before.segment.context == before.tokens:
            segment = before.segment
            segment.add_reply(call.new_tokens, "\n\n".join(texts))
        else:
            segment = OpenAnswer(call.prompt, self.number, 0, 0, self.stops)
            segment.turns.append(Turn("environment", "\n\n".join(texts)))
            self.segments.append((call.place, segment))
        segment.add_turn(reply)
        self.last = reply.text
        whole = (*call.prompt.tokens, *reply.tokens)
        *messages, last = call.messages
        if last["role"] == "assistant":  # the reply extends this message
            message = message | {"content": last["content"] + message["content"]}
        else:
            messages.append(last)
        self._exchanges.append(Exchange([*messages, message], whole, segment, cut, call.tools))
        self.is_cut |= reply.truncated and not call.is_short


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a request in one format. Raise Refused if they are invalid."""
    if not (isinstance(value, list) and value):
        raise Refused("'messages' must be a list of at least one message", param="messages")
    return [_message(one, f"messages[{at}]") for at, one in enumerate(value)]


def _message(one: Any, where: str) -> Message:
    try:
        parts = one.get("content") or ""
        texts = [part["text"] for part in parts] if isinstance(parts, list) else [parts]
        message: Message = {"role": ROLES[one["role"]], "content": "".join(texts)}
        if calls := one.get("tool_calls"):
            message["tool_calls"] = [
                {"id": made["id"], "type": "function", "function": {key: made["function"][key] for key in CALLED}}
                for made in calls
            ]
    except (LookupError, TypeError, AttributeError):
        reason = f"{where} must have a role ({', '.join(ROLES)}), text as its content, and valid tool calls if any"
        raise Refused(reason, param=where) from None
    return message | {name: one[name] for name in ("tool_call_id", "name") if isinstance(one.get(name), str)}


def same(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return True if all pairs of messages are equal, apart from ids and names of tool results, which are optional."""
    keys = ("role", "content", "tool_calls")
    return all(one.get(key) == other.get(key) for one, other in zip(some, others) for key in keys)
