"""One HTTP exchange with a server that may be slow, busy, faulty or unreachable."""

import asyncio
import json
import math
import os
import ssl
from collections.abc import Mapping
from typing import Any

from trainer.errors import ConfigError
from trainer.machine import threads
from trainer.machine.safe_text import named_as_keys, without_keys
from trainer.machine.user_code import must_be_named

LONGEST_WAIT_S = 120.0  # a request is not repeated if the server asks for a longer wait
LONGEST_REASON = 300  # characters of an error message, which may quote a reply
LONGEST_BODY = 10_000  # bytes that are read of a refusal
WORTH_RETRYING = (408, 409, 425, 429)  # HTTP statuses; also 500 and above


class NoReply(Exception):
    """A failed request. `wait_s` is the wait that the server asks for, `status` the HTTP status, if any."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0, status: int | None = None) -> None:
        super().__init__(reason)
        self.again = again and wait_s <= LONGEST_WAIT_S
        self.wait_s = wait_s
        self.status = status


def exchange(
    url: str, body: Mapping[str, Any] | None, timeout_s: float, largest: int, key: str = "", direct: bool = False
) -> bytes:
    """Return the reply to a POST of `body` as JSON, or to a GET if there is no body. Raise NoReply if anything fails.

    The timeout limits the whole exchange; a timeout of the socket would allow a byte a minute for ever. Redirects are
    not followed, because they could send a key to another host. `direct` ignores the proxies of the environment, which
    cannot reach this machine or the nodes of a cluster.
    """
    import httpx2

    sent = {"Content-Type": "application/json", "User-Agent": "octet-grpo", "Accept-Encoding": "identity"}
    sent |= {"Authorization": f"Bearer {key}"} if key else {}
    content = None if body is None else json.dumps(body).encode()
    reply, refused = bytearray(), list[httpx2.Response]()

    async def ask() -> None:
        verify = ssl.create_default_context() if url.startswith("https:") else False
        client = httpx2.AsyncClient(headers=sent, verify=verify, trust_env=not direct, timeout=None)
        async with client, client.stream("GET" if body is None else "POST", url, content=content) as response:
            refused.extend([] if response.is_success else [response])
            async for part in response.aiter_raw():
                reply.extend(part)
                if len(reply) > (LONGEST_BODY if refused else largest):
                    return

    failure = None
    try:
        # in another thread, because that of a notebook runs an event loop already
        threads.begin(lambda: asyncio.run(asyncio.wait_for(ask(), timeout_s))).result()
    except asyncio.TimeoutError:
        failure = NoReply(f"TimeoutError: the reply did not end within {timeout_s:g} s")
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        failure = NoReply(_reason(error))
    except (ImportError, ValueError) as error:  # a proxy of the environment that httpx does not support
        failure = NoReply(without_keys(str(error), LONGEST_REASON), again=False)
    if refused:
        raise _refusal(refused[0].status_code, refused[0].headers.get("Retry-After"), bytes(reply))
    if failure is not None:
        raise failure
    if len(reply) > largest:
        raise NoReply(f"the reply is longer than {largest >> 20} MiB")
    return bytes(reply)


def _reason(error: BaseException) -> str:
    """Return the root cause of an error, which says more than "all connection attempts failed"."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    text = os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else str(error)
    return f"{type(error).__name__}: {without_keys(text, LONGEST_REASON)}"


def _refusal(status: int, retry_after: str | None, body: bytes) -> NoReply:
    text = without_keys(" ".join(body[:LONGEST_BODY].decode("utf-8", "replace").split()), 1000)
    again = status in WORTH_RETRYING or status >= 500
    return NoReply(f"HTTP {status} {text}".strip(), again, seconds_of(retry_after) if again else 0.0, status)


def seconds_of(retry_after: str | None) -> float:
    """Return the seconds to wait for a `Retry-After` header, if it is a number; 0 for anything else, such as a date."""
    try:
        seconds = float(retry_after or 0)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0


def read_key(variable: str, setting: str = "") -> str:
    """Return the key in an environment variable, and keep it out of messages. h11 would quote an invalid key. Raise
    ConfigError if there is one, and the server that `setting` names is not one of the command."""
    if key := os.environ.get(variable, "").strip():
        must_be_named(setting)
    named_as_keys.add(variable)
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(variable, "the key has characters that HTTP headers do not allow", "Set the variable again")
    return key
