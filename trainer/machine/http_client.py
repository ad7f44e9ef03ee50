"""One HTTP exchange with a server that may be slow, busy, wrong or unreachable. Standard library only.

httpx has neither a deadline for the whole exchange, nor a limit on the size of the reply, nor `Retry-After`, so the
code would not be shorter with it, and its import takes a third of a second.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from trainer.errors import ConfigError
from trainer.machine.visible import named_as_keys, without_keys

LONGEST_WAIT_S = 120.0  # a request is given up if the server asks for a longer wait
LONGEST_REASON = 300  # characters of an error that may quote a reply
LONGEST_BODY = 10_000  # bytes of a refusal that are read
WORTH_RETRYING = (408, 409, 425, 429)  # and everything from 500 on


class NoReply(Exception):
    """A request that failed. `wait_s` is the wait that the server asks for, `status` the HTTP status, if any."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason)
        self.again = again and wait_s <= LONGEST_WAIT_S
        self.wait_s = wait_s
        self.status = status


def exchange(
    url: str,
    body: Mapping[str, Any] | None,
    timeout_s: float,
    largest: int,
    headers: Mapping[str, str] | None = None,
    direct: bool = False,
) -> bytes:
    """Return the reply to a POST of `body` as JSON, or to a GET if there is no body. Raise NoReply if anything fails.

    `direct` ignores the proxies of the environment, which do not lead to this machine or to the nodes of a cluster."""
    sent = {"Content-Type": "application/json", "User-Agent": "octet-grpo", **(headers or {})}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, sent, method="GET" if body is None else "POST")
    with _Deadline(timeout_s) as deadline:
        try:
            with deadline.opener(direct).open(request, timeout=timeout_s) as response:
                reply = _read(response, largest)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            deadline.check()
            reason = getattr(error, "reason", None) or error
            raise NoReply(f"{type(reason).__name__}: {without_keys(str(reason), LONGEST_REASON)}") from None
        deadline.check()
        return reply


class _Deadline:
    """Cuts off the connections of an exchange when its time is over. The timeout of a socket alone would allow a byte a
    minute for ever, in the headers, in the body, or while an encrypted connection is made."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds
        self._sockets: list[socket.socket] = []
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()
        for one in self._sockets:
            one.close()

    def check(self) -> None:
        """Raise NoReply if the time is over."""
        if time.monotonic() >= self._end:
            raise NoReply(f"TimeoutError: the reply did not end within {self.seconds:g} s") from None

    def opener(self, direct: bool) -> urllib.request.OpenerDirector:
        proxies = [urllib.request.ProxyHandler({})] if direct else []
        return urllib.request.build_opener(_NoRedirects, _Http(self), _Https(self), *proxies)

    def connection(self, kind: type[http.client.HTTPConnection], host: str, **options: Any) -> Any:
        made: Any = kind(host, **options)
        made._create_connection = self._connect
        return made

    def _connect(self, *arguments: Any) -> socket.socket:
        made = socket.create_connection(*arguments)
        self._sockets.append(made.dup())  # encryption takes the first one over
        self.check()
        return made

    def _cut(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):  # it has ended by itself
                one.shutdown(socket.SHUT_RDWR)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(self.deadline.connection, http.client.HTTPConnection), request)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(partial(self.deadline.connection, http.client.HTTPSConnection), request)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect, because it would carry a key to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _refusal(error: urllib.error.HTTPError) -> NoReply:
    try:
        text = without_keys(" ".join(error.read(LONGEST_BODY).decode("utf-8", "replace").split()), 1000)
    except (OSError, http.client.HTTPException):
        text = ""
    again = error.code in WORTH_RETRYING or error.code >= 500
    wait_s = seconds_of(error.headers.get("Retry-After"))
    return NoReply(f"HTTP {error.code} {text}".strip(), again, wait_s, error.code)


def _read(response: http.client.HTTPResponse, largest: int) -> bytes:
    body = response.read(largest + 1)
    if len(body) > largest:
        raise NoReply(f"the reply is longer than {largest >> 20} MiB")
    return body


def seconds_of(retry_after: str | None) -> float:
    """Return the seconds to wait for a `Retry-After`, which is a number or a date; 0 for anything else."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        seconds = _seconds_until(retry_after or "")
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def _seconds_until(date: str) -> float:
    try:
        then = parsedate_to_datetime(date)
        return (then if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp() - time.time()
    except (ValueError, TypeError, LookupError, OverflowError):
        return 0.0


def read_key(variable: str) -> str:
    """Return the key in an environment variable. No message shows it: http.client would quote a bad one."""
    key = os.environ.get(variable, "").strip()
    named_as_keys.add(variable)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(variable, "the key has characters that cannot stand in a header", "Set the variable again")
    return key
