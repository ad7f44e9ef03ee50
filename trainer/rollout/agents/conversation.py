"""What an agent has said to the model and heard from it in one answer, in the tokens that were sampled.

A call that begins with the messages of an earlier one, and with the reply to it, continues there: its tokens are those
of the earlier call, the reply as it was sampled, and then the new messages, or what the last message adds to a reply
that was cut. Every other call begins a new segment. The first call that continues a reply extends its segment; a second
one, such as a call in parallel, begins a segment whose prompt is the whole conversation so far. So every token that the
model wrote is trained on exactly once.
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
# What chat templates call the roles of OpenAI's messages.
ROLES = {one: one for one in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}
CALLED = ("name", "arguments")
LONGEST_TOKEN = 256  # characters: no vocabulary has a longer one


class Refused(Exception):
    """A call that the model does not answer, in the terms of OpenAI's errors."""

    def __init__(self, message: str, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


@dataclass(frozen=True, slots=True)
class Limits:
    """What one answer may use: calls, tokens of a reply, tokens of a conversation, and seconds between two calls."""

    calls: int
    new_tokens: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """A call that was answered: its messages with the reply at the end, and the tokens of all of that."""

    messages: list[Message]
    tokens: tuple[int, ...]
    segment: OpenAnswer
    cut: str  # the stop string of the call at the end of the reply, which its message leaves out

    def goes_on(self, messages: Sequence[Message]) -> bool:
        """Return True if the messages begin with all of these, or add to the reply at their end."""
        *before, reply = self.messages
        if not same(before, messages[: len(before)]) or len(messages) < len(self.messages):
            return False
        return same([reply], messages[len(before) :]) if messages[len(self.messages) :] else self.added(messages) != ""

    def added(self, messages: Sequence[Message]) -> str:
        """Return what the last message adds to the reply, if there are no more of them."""
        *_, reply = self.messages
        last = messages[-1]
        adds = len(messages) == len(self.messages) and last["role"] == "assistant" and "tool_calls" not in reply
        if not (adds and last["content"].startswith(reply["content"])):
            return ""
        return str(last["content"].removeprefix(reply["content"]).removeprefix(self.cut))


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that waits for the model. `told` are the tokens between the reply that it continues and the next one."""

    conversation: "Conversation"
    prompt: Prompt
    messages: list[Message]
    tools: Sequence[Mapping[str, Any]]
    continued: Exchange | None
    told: tuple[int, ...]
    strings: Sequence[str]  # that end its reply, and are not in it
    is_short: bool  # the agent itself wants fewer tokens than it may have
    place: tuple[int, ...]  # among the calls of its answer, whichever of those in parallel came first
    reply: "Future[Completion]" = field(default_factory=Future)


class Conversation:
    """All calls of one answer, and the agent that makes them. Several threads may ask at once."""

    def __init__(
        self, prompter: Prompter, stops: Stops, prompt: Prompt, number: int, limits: Limits, index: int = 0
    ) -> None:
        self.prompter, self.stops, self.prompt, self.number, self.limits = prompter, stops, prompt, number, limits
        self.index = index  # of the prompt
        self.key = secrets.token_urlsafe(24)  # of its agent
        self.deadline = 0.0  # of the next call
        self.pending = 0  # calls that the model has not answered yet
        self.segments: list[tuple[tuple[int, ...], OpenAnswer]] = []  # each with the place of its first call
        self.calls = 0
        self.is_cut = False  # by a limit
        self.is_rewritten = False
        self.last = ""  # what the model wrote last
        self._exchanges: list[Exchange] = []
        self._asked: Counter[int] = Counter()
        self._lock = threading.Lock()

    def call(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]], most: int | None, strings: Sequence[str]
    ) -> Call:
        """Return a call as the sampler takes it. Raise Refused if a limit of the answer does not allow it."""
        with self._lock:
            if self.calls == self.limits.calls:
                self.is_cut = True
                raise Refused(f"the answer has rollout.turns.most={self.limits.calls} calls", 429, "too_many_calls")
            characters = sum(len(one["content"]) for one in messages)
            if characters > self.limits.context * LONGEST_TOKEN:  # which would take seconds to tokenize
                raise self._too_long(f"{characters} characters")
            continued = self._continued(messages)
            told = self._told(messages, tools, continued)
            context = (*continued.tokens, *told) if continued else told
            room = min(self.limits.context - len(context), self.limits.new_tokens)
            if room < 1:
                raise self._too_long(f"{len(context)} tokens")
            digest = zlib.crc32(repr(context).encode())
            name = f"{self.prompt.problem.id}/{digest:08x}/{self._asked[digest]}"
            place = len(self._exchanges), digest, self._asked[digest]
            self._asked[digest] += 1
            self.calls += 1
        problem = replace(self.prompt.problem, id=name)
        is_short = most is not None and most < room
        asked = Prompt(
            problem,
            "",
            context,
            self.prompt.repeat,
            self.prompt.place,
            most=most if is_short else room,
            stop=(*strings,),
        )
        return Call(self, asked, messages, tools, continued, told, strings, is_short, place)

    def answer(self, call: Call, sampled: Completion) -> tuple[Message, str, int]:
        """Record what the model wrote. Return it as a message, why it ended, in OpenAI's words, and its tokens."""
        reply = self.stops.also(call.strings).completion(sampled.tokens, sampled.logprobs, sampled.version)
        shown = min((reply.text.partition(string)[0] for string in call.strings), key=len, default=reply.text)
        text, calls = calls_in(shown, [tool["function"]["name"] for tool in call.tools])
        message: Message = {"role": "assistant", "content": text}
        for name, arguments in calls:
            called = {"name": name, "arguments": json.dumps(arguments)}
            made = message.setdefault("tool_calls", [])
            made.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": called})
        with self._lock:
            self._record(call, reply, message, reply.text[len(shown) :])
        if calls:
            return message | {"content": text or None}, "tool_calls", len(reply.tokens)
        return message, "length" if reply.truncated else "stop", len(reply.tokens)

    def completion(self, value: str | float | None, failed: bool) -> Completion:
        """Return the whole answer. Its text is what the agent returned, or else the last reply."""
        text = value if isinstance(value, str) else "" if failed else self.last
        reward = 0.0 if failed else value if isinstance(value, float) else None
        whole = OpenAnswer(self.prompt, self.number, 0, 0)
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

    def _continued(self, messages: list[Message]) -> Exchange | None:
        """Return the longest exchange that the messages begin with, if there is more behind it."""
        found = [one for one in self._exchanges if one.goes_on(messages)]
        if messages[-1]["role"] == "assistant":  # a turn that the model has ended cannot go on
            found = [one for one in found if one.tokens[-1] not in self.stops.tokens]
        self.is_rewritten |= bool(self._exchanges) and not found
        return max(found, key=lambda one: len(one.messages), default=None)

    def _told(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]], continued: Exchange | None
    ) -> tuple[int, ...]:
        tokenizer = self.stops.tokenizer
        safe, tools = json.loads(without_special(tokenizer, json.dumps([messages, tools], ensure_ascii=False)))
        for function in (made["function"] for one in safe for made in one.get("tool_calls", ())):
            with suppress(ValueError, TypeError, RecursionError):  # templates write arguments as values
                function["arguments"] = json.loads(function["arguments"])
        try:
            if continued is None:
                text = self.prompter.conversation(safe, tools)
                return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
            if added := continued.added(messages):
                return tuple(tokenizer(without_special(tokenizer, added), add_special_tokens=False)["input_ids"])
            turn = TURN
            while any(turn in one["content"] for one in safe):
                turn += "-"
            safe[len(continued.messages) - 1] = {"role": "assistant", "content": turn}
            text = self.prompter.conversation(safe, tools).rpartition(turn)[2]
        except DataError as error:
            raise Refused(str(error), param="messages") from None
        return tuple(joined(self.stops, continued.tokens[-1], text))

    def _record(self, call: Call, reply: Completion, message: Message, cut: str) -> None:
        said = [one["content"] for one in call.messages]
        if (before := call.continued) is not None:
            said = [before.added(call.messages)] if before.added(call.messages) else said[len(before.messages) :]
        if before is not None and before.segment.context == before.tokens:
            segment = before.segment
            segment.listen(call.told, "\n\n".join(said))
        else:
            segment = OpenAnswer(call.prompt, self.number, 0, 0)
            segment.turns.append(Turn("environment", "\n\n".join(said)))
            self.segments.append((call.place, segment))
        segment.write(reply)
        self.last = reply.text
        whole = (*call.prompt.tokens, *reply.tokens)
        self._exchanges.append(Exchange(self._heard(call, message), whole, segment, cut))
        self.is_cut |= reply.truncated and not call.is_short

    def _heard(self, call: Call, message: Message) -> list[Message]:
        """Return the conversation with a reply, which may have added to the message before it."""
        if call.messages[-1]["role"] != "assistant":
            return [*call.messages, message]
        *before, last = call.messages
        return [*before, message | {"content": last["content"] + message["content"]}]


def read_messages(value: Any) -> list[Message]:
    """Return the messages of a request in one form. Raise Refused if they are none."""
    if not (isinstance(value, list) and value):
        raise Refused("'messages' is a list of at least one message", param="messages")
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
        reason = (
            f"{where} has no role ({', '.join(ROLES)}), content that is no text, or calls of tools that cannot be read"
        )
        raise Refused(reason, param=where) from None
    return message | {name: one[name] for name in ("tool_call_id", "name") if isinstance(one.get(name), str)}


def same(some: Sequence[Message], others: Sequence[Message]) -> bool:
    """Return True if messages say the same. Agents may leave out the names of tool calls' answers."""
    keys = ("role", "content", "tool_calls")
    return all(one.get(key) == other.get(key) for one, other in zip(some, others) for key in keys)
