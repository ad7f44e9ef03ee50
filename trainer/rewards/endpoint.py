"""Questions to an OpenAI-compatible endpoint that may be slow, busy, wrong or away. Standard library only.

`Client.ask` gives what `understand` makes of the reply, or None: after the last retry, or when the budget is spent.
It never raises for what the endpoint does. The key is in the header of the request and nowhere else.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import math
import os
import random
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypeVar

from trainer.config import Judge as JudgeSettings
from trainer.errors import ConfigError
from trainer.rewards.scorer import Meter

T = TypeVar("T")

LONGEST_WAIT_S = 120.0  # an endpoint that asks for more patience has its question given up
LONGEST_BACKOFF_S = 60.0
CHARACTERS_A_TOKEN = 4
LARGEST_REPLY = 4 << 20  # bytes
WORTH_RETRYING = (408, 409, 425, 429)  # and everything from 500 on


class NoReply(Exception):
    """One try that failed. `wait_s` is what the endpoint asked for."""

    def __init__(self, reason: str, again: bool = True, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.again = again and wait_s <= LONGEST_WAIT_S
        self.wait_s = wait_s


class Client:
    """Safe to call from several threads; how many is the caller's choice."""

    def __init__(self, settings: JudgeSettings, ranks: int = 1) -> None:
        assert settings.url, "the settings want one"
        base = settings.url.rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self.settings = settings
        self.budget = Budget(_share(settings.max_requests, ranks), _share(settings.max_tokens, ranks))
        self.cache = Cache(settings.cache.expanduser()) if settings.cache else None
        self.last_failure = ""
        self._key = read_key(settings.key_env)
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._not_before = 0.0  # when the endpoint is busy, all threads wait

    def ask(
        self, body: Mapping[str, Any], understand: Callable[[str], T | None], meter: Meter, fresh: bool = False
    ) -> T | None:
        """`understand` returns None for a text that is no answer. `fresh` asks even if the answer is in the cache."""
        name = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        kept = None if fresh else self._kept(name, understand)
        if kept is not None:
            meter.add("judge/from_cache", 1)
            return kept
        for attempt in range(self.settings.retries + 1):
            self._wait(attempt)
            if not self.budget.take():
                self.last_failure = "the budget (reward.judge.max_requests, max_tokens) is spent"
                return None
            try:
                return self._try(name, body, understand, meter)
            except NoReply as failure:
                self.last_failure = self._without_key(str(failure))
                if not failure.again:
                    return None
                self._not_before = max(self._not_before, time.monotonic() + failure.wait_s)
        return None

    def _kept(self, name: str, understand: Callable[[str], T | None]) -> T | None:
        text = self.cache.get(name) if self.cache else None
        return None if text is None else understand(text)

    def _try(self, name: str, body: Mapping[str, Any], understand: Callable[[str], T | None], meter: Meter) -> T:
        text = self._reply(body, meter)
        understood = understand(text)
        if understood is None:
            raise NoReply(f"the reply is not what was asked for: {text[:200]!r}")
        if self.cache:
            self.cache.put(name, text)
        return understood

    def _wait(self, attempt: int) -> None:
        """Twice as long each time, give or take half, so that threads do not come back together."""
        backoff = min(LONGEST_BACKOFF_S, self.settings.backoff_s * 2 ** (attempt - 1)) if attempt else 0.0
        time.sleep(max(backoff * random.uniform(0.5, 1.5), self._not_before - time.monotonic(), 0.0))

    def _reply(self, body: Mapping[str, Any], meter: Meter) -> str:
        meter.add("judge/requests", 1)
        try:
            reply = json.loads(self._post(body))
            text = reply["choices"][0]["message"]["content"]
            counted = (reply.get("usage") or {}).get("total_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise NoReply("the reply is no chat completion in JSON") from None
        if not isinstance(text, str):
            raise NoReply("the reply has no text")
        if not isinstance(counted, int) or counted <= 0:  # some do not count
            counted = (len(json.dumps(body)) + len(text)) // CHARACTERS_A_TOKEN
        self.budget.spend(counted)
        meter.add("judge/tokens", counted)
        return text

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json", "User-Agent": "octet-grpo"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        deadline = time.monotonic() + self.settings.timeout_s
        try:
            with self._opener.open(request, timeout=self.settings.timeout_s) as response:
                return _read(response, deadline)
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise NoReply(f"{type(reason).__name__}: {reason}") from None

    def _without_key(self, text: str) -> str:
        """An endpoint may quote the key in its complaint."""
        return text.replace(self._key, "***") if self._key else text


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def _refusal(error: urllib.error.HTTPError) -> NoReply:
    try:
        said = " ".join(error.read(1000).decode("utf-8", "replace").split())
    except (OSError, http.client.HTTPException):
        said = ""
    again = error.code in WORTH_RETRYING or error.code >= 500
    return NoReply(f"HTTP {error.code} {said}".strip(), again, seconds_of(error.headers.get("Retry-After")))


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body; the timeout of the socket alone would allow a byte a minute for ever."""
    parts, size = [], 0
    while part := response.read1(1 << 16):
        parts.append(part)
        size += len(part)
        if time.monotonic() > deadline:
            raise TimeoutError("the reply did not end in time")
        if size > LARGEST_REPLY:
            raise NoReply("the reply is longer than 4 MiB")
    return b"".join(parts)


def seconds_of(retry_after: str | None) -> float:
    """`Retry-After` is a number of seconds or a date; 0 where it is neither."""
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
    return (then if then.tzinfo else then.replace(tzinfo=timezone.utc)).timestamp() - datetime.now().timestamp()


def read_key(variable: str) -> str:
    """The key, which is in no message: http.client would quote a bad one in its error."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f"{variable}: the key has characters that cannot stand in a header. Set the variable again.")
    return key


def _share(limit: int | None, ranks: int) -> int | None:
    return limit and max(1, limit // ranks)


@dataclass
class Budget:
    """Requests and tokens that may still be spent; None is no limit. Requests under way may overdraw the tokens."""

    requests: int | None
    tokens: int | None

    def __post_init__(self) -> None:
        self._counting = threading.Lock()

    def take(self) -> bool:
        """One request, if there is one left."""
        with self._counting:
            if (self.requests is not None and self.requests <= 0) or (self.tokens is not None and self.tokens <= 0):
                return False
            self.requests = None if self.requests is None else self.requests - 1
            return True

    def spend(self, tokens: int) -> None:
        with self._counting:
            self.tokens = None if self.tokens is None else self.tokens - tokens


class Cache:
    """One small file for each reply, which appears whole or not at all, also with several processes and over NFS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"reward.judge.cache={folder}: it cannot be made: {error}. Name a folder you may write to, or null."
            ) from None

    def get(self, name: str) -> str | None:
        try:
            kept = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut short by a power failure
            return None
        return kept if isinstance(kept, str) else None

    def put(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk makes the next run pay again; it does not end this one
            self._path(name).parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as file:
                json.dump(text, file)
            os.replace(file.name, self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.json"
