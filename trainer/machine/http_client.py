"""One HTTP exchange with a server that may be slow, busy, wrong or unreachable. Standard library only.

httpx has neither a deadline for the whole reply, nor a limit on its size, nor `Retry-After`, so the code would not be
shorter with it, and its import takes a third of a second.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timezone
from email.utils import parsedate_to_datetime
from typing import Any

from trainer.errors import ConfigError

LONGEST_WAIT_S = 120.0  # a request is given up if the server asks for a longer wait
WORTH_RETRYING = (408, 409, 425, 429)  # and everything from 500 on


class NoReply(Exception):
    """A request that failed. `wait_s` is the wait that the server asks for, `status` the HTTP status, if any."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason)
        self.again = again and wait_s <= LONGEST_WAIT_S
        self.wait_s = wait_s
        self.status = status

    def with_reason(self, reason: str) -> NoReply:
        """Return the same failure with another reason."""
        return NoReply(reason, self.again, self.wait_s, self.status)


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
    deadline = time.monotonic() + timeout_s
    try:
        with (_DIRECT if direct else _OPENER).open(request, timeout=timeout_s) as response:
            return _read(response, deadline, largest)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(error) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise NoReply(f"{type(reason).__name__}: {reason}") from None


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follow no redirect, because it would carry a key to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
_DIRECT = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))


def _refusal(error: urllib.error.HTTPError) -> NoReply:
    try:
        text = " ".join(error.read(1000).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException):
        text = ""
    again = error.code in WORTH_RETRYING or error.code >= 500
    wait_s = seconds_of(error.headers.get("Retry-After"))
    return NoReply(f"HTTP {error.code} {text}".strip(), again, wait_s, error.code)


def _read(response: http.client.HTTPResponse, deadline: float, largest: int) -> bytes:
    """Return the body. The timeout of the socket alone would allow a byte a minute for ever."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the reply did not end in time")
        if size > largest:
            raise NoReply(f"the reply is longer than {largest >> 20} MiB")
    return b"".join(parts)


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
    except ValueError:
        return 0.0
    return (then if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp() - time.time()


def read_key(variable: str) -> str:
    """Return the key in an environment variable. No message shows it: http.client would quote a bad one."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable}: the key has characters that cannot stand in a header. Set the variable again.")
    return key
