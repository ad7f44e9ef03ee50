"""The part of OpenAI's API that agents use, on this machine only: chat completions and the list of models.

The API key of a call identifies the answer that it belongs to.
"""

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.machine.safe_text import visible
from trainer.problem.environment import NO_TOOLS, has_tools
from trainer.rollout.agents.conversation import Call, Conversation, Refused, read_messages

PATH, MODELS = "/v1/chat/completions", "/v1/models"
# Fields of a request that are read, and other fields that cause no warning.
READ = {"model", "messages", "tools", "n", "stop", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
WITHOUT_EFFECT = {"user", "metadata", "store", "tool_choice"}


class Endpoint(ThreadingHTTPServer):
    """Serves the calls of agents. `find` returns the conversation of a key, `ask` passes a call to the sampler, and
    `say_once` prints a message once per kind."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, find: Callable[[str], Conversation | None], ask: Callable[[Call], None], say_once: Callable[..., None]
    ) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.find, self.ask, self.say_once = find, ask, say_once
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the traceback of an error, except for the closed connections of agents that were ended."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Endpoint
    timeout = 600

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        model = {"id": "octet", "object": "model", "created": 0, "owned_by": "octet"}
        self._answer({MODELS: lambda _: {"object": "list", "data": [model]}, f"{MODELS}/octet": lambda _: model})

    def do_POST(self) -> None:
        self._answer({PATH: self._complete})

    def _answer(self, paths: Mapping[str, Callable[[Conversation], Mapping[str, Any] | bytes]]) -> None:
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        path = self.path.partition("?")[0].rstrip("/")
        try:
            conversation = self.server.find(key.strip()) if kind == "Bearer" else None
            if conversation is None:
                reason = "this API key belongs to no answer in progress; make the client inside the agent's function"
                raise Refused(reason, 401, "invalid_api_key")
            if path not in paths:
                raise Refused(f"there is no {path[:80]}; agents use {PATH}", 404)
            self._send(paths[path](conversation))
        except Refused as error:
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            body = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
            self.close_connection = True  # the body of the request may not have been read
            self._send({"error": body}, error.status)

    def _complete(self, conversation: Conversation) -> Mapping[str, Any] | bytes:
        request = self._request()
        messages, tools, strings = read_messages(request.get("messages")), _tools(request), _strings(request)
        most = _number(request, "max_completion_tokens") or _number(request, "max_tokens")
        count = _number(request, "n") or 1
        ignored = {*request} - READ - WITHOUT_EFFECT
        if request.get("tool_choice") not in (None, "auto", "none"):
            ignored.add("a tool_choice other than auto and none")
        for name in map(visible, sorted(ignored)):
            self.server.say_once(f"`{name[:60]}` of its calls has no effect: the settings of the run decide", name)
        if tools and not has_tools(conversation.stops.tokenizer.chat_template):
            self.server.say_once(f"its calls offer tools, which have no effect: {NO_TOOLS}", "tools")
        calls = [conversation.call(messages, tools, most, strings, left) for left in range(count, 0, -1)]
        for call in calls:
            self.server.ask(call)
        try:
            replies = [call.reply.result() for call in calls]
        except CancelledError:
            raise Refused("the answer was ended", 503) from None
        answers = [conversation.answer(call, reply) for call, reply in zip(calls, replies)]
        read, written = len(calls[0].prompt.tokens), sum(tokens for *_, tokens in answers)
        whole = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "octet",
            "choices": [
                {"index": at, "message": message, "finish_reason": reason, "logprobs": None}
                for at, (message, reason, _) in enumerate(answers)
            ],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }
        return _events(whole, request.get("stream_options")) if request.get("stream") else whole

    def _request(self) -> dict[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise Refused("the request has no Content-Length", 411)
        try:
            request = json.loads(self.rfile.read(int(length)))
            # replace lone surrogates, which a tokenizer refuses
            request = json.loads(json.dumps(request, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            raise Refused("the request is not JSON") from None
        if not isinstance(request, dict):
            raise Refused("the request is not a JSON object")
        return request

    def _send(self, reply: Mapping[str, Any] | bytes, status: int = 200) -> None:
        """Send JSON, or all events of a stream at once: a reply is complete and recorded before it is sent."""
        body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if body is reply else "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        if status >= 400:
            self.send_header("x-should-retry", "false")  # OpenAI's clients obey it
        self.end_headers()
        self.wfile.write(body)


def _events(whole: dict[str, Any], options: Any) -> bytes:
    """Return a reply as a stream of events, with the whole text in one of them."""
    head = {**whole, "object": "chat.completion.chunk"}
    usage, lines = head.pop("usage"), []
    for choice in head.pop("choices"):
        delta, reason = choice["message"], choice["finish_reason"]
        if calls := delta.get("tool_calls"):
            delta = {**delta, "tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]}
        for part, why in ((delta, None), ({}, reason)):
            lines.append(head | {"choices": [{"index": choice["index"], "delta": part, "finish_reason": why}]})
    if isinstance(options, dict) and options.get("include_usage"):
        lines.append({**head, "choices": [], "usage": usage})
    return b"".join(f"data: {json.dumps(line)}\n\n".encode() for line in lines) + b"data: [DONE]\n\n"


def _tools(request: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    tools = request.get("tools") or []
    try:
        are_named = all(isinstance(tool["function"]["name"], str) for tool in tools)
    except (LookupError, TypeError):
        are_named = False
    if not are_named:
        raise Refused("'tools' must be a list of functions with names", param="tools")
    return [] if request.get("tool_choice") == "none" else tools


def _number(request: Mapping[str, Any], name: str) -> int | None:
    value: int | None = request.get(name)
    if value is not None and not (type(value) is int and value >= 1):
        raise Refused(f"'{name}' must be an integer, 1 or more", param=name)
    return value


def _strings(request: Mapping[str, Any]) -> list[str]:
    stop = request.get("stop") or []
    strings = [stop] if isinstance(stop, str) else stop
    if not (isinstance(strings, list) and all(isinstance(one, str) and one for one in strings)):
        raise Refused("'stop' must be a string or a list of strings", param="stop")
    return strings
