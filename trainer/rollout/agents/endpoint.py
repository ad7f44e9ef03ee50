"""The part of OpenAI's interface that agents use, on this machine only: chat completions and the name of the model.

Each answer has a key of its own, which says whose call it is.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.machine.visible import visible
from trainer.records import Completion
from trainer.rollout.agents.conversation import Call, Conversation, Message, Refused, read_messages

LARGEST = 4_000_000  # bytes of a request
MOST_CHOICES = 64
PATH = "/v1/chat/completions"
# What is read of a request, and what has no effect on it that an agent could see.
READ = {"model", "messages", "tools", "n", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
WITHOUT_EFFECT = {"user", "metadata", "store", "parallel_tool_calls", "tool_choice", "logprobs", "top_logprobs"}

Ask = Callable[[Call], None]


class Endpoint(ThreadingHTTPServer):
    """Answers the calls of agents. `find` returns the conversation of a key, and `ask` hands a call to the sampler."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, find: Callable[[str], Conversation | None], ask: Ask, say: Callable[[str], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.find, self.ask, self.say = find, ask, say
        self.said = set(WITHOUT_EFFECT)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def name_ignored(self, names: Iterable[str]) -> None:
        """Say once of each parameter of a request that it is not read."""
        for name in sorted({*names} - self.said):
            self.said.add(name)
            self.say(f"task.agent: `{visible(name)[:60]}` of its calls has no effect: the settings of the run decide")

    def handle_error(self, *_: object) -> None:
        """An agent that was ended has hung up, which is nothing to report."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint
    timeout = 600

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        def models() -> None:
            self._conversation()
            if self.path.rstrip("/") != "/v1/models":
                raise Refused(f"there is no {self.path[:80]}", 404)
            self._send(
                {"object": "list", "data": [{"id": "octet", "object": "model", "created": 0, "owned_by": "octet"}]}
            )

        self._answered(models)

    def do_POST(self) -> None:
        self._answered(self._complete)

    def _answered(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Refused as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            told = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
            self.close_connection = True  # the body may not have been read
            self._send({"error": told}, error.status)

    def _conversation(self) -> Conversation:
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        found = self.server.find(key.strip()) if kind == "Bearer" else None
        if found is None:
            raise Refused("this is no key of an answer that is being written", 401, "invalid_api_key")
        return found

    def _complete(self) -> None:
        conversation, request = self._conversation(), self._request()
        if self.path.rstrip("/") != PATH:
            raise Refused(f"there is no {self.path[:80]}; agents use {PATH}", 404)
        messages = read_messages(request.get("messages"))
        tools, most, strings = _tools(request), _most(request), _strings(request)
        self.server.name_ignored(request.keys() - READ)
        count = request.get("n") or 1
        if not (isinstance(count, int) and 1 <= count <= MOST_CHOICES):
            raise Refused(f"'n' is a number from 1 to {MOST_CHOICES}", param="n")
        calls = [conversation.call(messages, tools, most, strings) for _ in range(count)]
        for call in calls:
            self.server.ask(call)
        try:
            replies = [call.reply.result() for call in calls]
        except CancelledError:
            raise Refused("the answer has been given up", 503) from None
        choices = [_choice(at, *conversation.answer(call, one)) for at, (call, one) in enumerate(zip(calls, replies))]
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": "octet"}
        usage = _usage(calls, replies)
        if request.get("stream"):
            self._stream(head, choices, usage, request.get("stream_options"))
        else:
            self._send({**head, "object": "chat.completion", "choices": choices, "usage": usage})

    def _request(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused("the request has no Content-Length", 411)
        if int(length) > LARGEST:
            raise Refused(f"the request has {length} bytes, and may have {LARGEST}", 413)
        try:
            request = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refused("the request is not JSON") from None
        if not isinstance(request, dict):
            raise Refused("the request is no JSON object")
        return request

    def _send(self, reply: Mapping[str, Any], status: int = 200) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, head: dict[str, Any], choices: list[Any], usage: dict[str, int], options: Any) -> None:
        """Send the reply as events. The whole text is one of them, because it is recorded when it has ended."""
        events: list[dict[str, Any]] = []
        for choice in choices:
            delta = dict(choice["message"])
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(delta.get("tool_calls", ()))]
            events += [{"index": choice["index"], "delta": delta, "finish_reason": None}]
            events += [{"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}]
        lines = [{**head, "object": "chat.completion.chunk", "choices": [event]} for event in events]
        if isinstance(options, dict) and options.get("include_usage"):
            lines.append({**head, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(b"".join(f"data: {json.dumps(line)}\n\n".encode() for line in lines) + b"data: [DONE]\n\n")


def _choice(index: int, message: Message, reason: str) -> dict[str, Any]:
    shown = {**message, "content": message["content"] or None} if "tool_calls" in message else message
    return {"index": index, "message": shown, "finish_reason": reason, "logprobs": None}


def _usage(calls: list[Call], replies: list[Completion]) -> dict[str, int]:
    asked, written = len(calls[0].prompt.tokens), sum(len(one.tokens) for one in replies)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def _tools(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = request.get("tools") or []
    try:
        named = [isinstance(one["function"]["name"], str) for one in tools]
    except (LookupError, TypeError):
        named = [False]
    if not all(named):
        raise Refused("'tools' is a list of functions with names", param="tools")
    return [] if request.get("tool_choice") == "none" else tools


def _most(request: Mapping[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        most = request.get(name)
        if most is not None and not (isinstance(most, int) and most >= 1):
            raise Refused(f"'{name}' is a number above 0", param=name)
        if most is not None:
            return most
    return None


def _strings(request: Mapping[str, Any]) -> list[str]:
    stop = request.get("stop") or []
    strings = [stop] if isinstance(stop, str) else stop
    if not (isinstance(strings, list) and all(isinstance(one, str) and one for one in strings)):
        raise Refused("'stop' is a text or a list of texts", param="stop")
    return strings
