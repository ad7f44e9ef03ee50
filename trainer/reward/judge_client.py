"""A client for an OpenAI-compatible endpoint that may be slow, busy, wrong or unreachable.

`Client.ask` returns what `parse` makes of the reply, or None after the last retry and when the budget is spent. It
never raises an error for what the endpoint does. The key is in the header of the request and nowhere else.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from trainer.config.settings import Judge as JudgeSettings
from trainer.errors import CheckpointError, ConfigError
from trainer.machine import disk
from trainer.machine.http_client import NoReply, exchange, read_key
from trainer.machine.visible import without_keys
from trainer.reward.scorer import Meter

T = TypeVar("T")

LONGEST_BACKOFF_S = 60.0
CHARACTERS_A_TOKEN = 4
LARGEST_REPLY = 4 << 20  # bytes
SPENT = "the budget (reward.judge.max_requests, max_tokens) is spent"


class Client:
    """Asks an endpoint. It may be called from several threads."""

    def __init__(self, settings: JudgeSettings, folder: Path | None = None) -> None:
        assert settings.url, "the settings require a URL"
        base = settings.url.rstrip("/")
        self.url = base if base.endswith("/chat/completions") else f"{base}/chat/completions"
        self.settings = settings
        self.budget = Budget(settings.max_requests, settings.max_tokens, folder and folder / "judge.json")
        self.cache = Cache(settings.cache.expanduser()) if settings.cache else None
        self.last_failure = ""
        self._key = read_key(settings.key_env)
        self._not_before = 0.0  # all threads wait until then, because the endpoint is busy

    def ask(
        self, body: Mapping[str, Any], parse: Callable[[str], T | None], meter: Meter, fresh: bool = False
    ) -> T | None:
        """Return the parsed reply. `parse` returns None for an invalid one; `fresh` asks even if one is cached."""
        name = hashlib.sha256(json.dumps([self.url, body], sort_keys=True).encode()).hexdigest()
        known = self.cache.get(name) if self.cache and not fresh else None
        if known is not None and (cached := parse(known)) is not None:
            meter.add("judge/from_cache", 1)
            return cached
        for attempt in range(self.settings.retries + 1):
            self._wait(attempt)
            if not self.budget.take():
                self.last_failure = f"{self.last_failure}, and then {SPENT}" if attempt else SPENT
                return None
            try:
                text = self._reply(body, meter)
                if (parsed := parse(text)) is None:
                    raise NoReply(f"the reply is not what was asked for: {without_keys(text, 200)!r}")
            except NoReply as failure:
                self.last_failure = without_keys(str(failure))
                if not failure.again:
                    return None
                self._not_before = max(self._not_before, time.monotonic() + failure.wait_s)
            else:
                if self.cache:
                    self.cache.put(name, text)
                return parsed
        return None

    def _wait(self, attempt: int) -> None:
        """Wait before an attempt, twice as long each time, with jitter so that threads do not retry together."""
        backoff = min(LONGEST_BACKOFF_S, self.settings.backoff_s * 2 ** (attempt - 1)) if attempt else 0.0
        time.sleep(max(backoff * random.uniform(0.5, 1.5), self._not_before - time.monotonic(), 0.0))

    def _reply(self, body: Mapping[str, Any], meter: Meter) -> str:
        meter.add("judge/requests", 1)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            reply = json.loads(exchange(self.url, body, self.settings.timeout_s, LARGEST_REPLY, headers))
            text = reply["choices"][0]["message"]["content"]
            tokens = (reply.get("usage") or {}).get("total_tokens")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise NoReply("the reply is no chat completion in JSON") from None
        if not isinstance(text, str):
            raise NoReply("the reply has no text")
        if not isinstance(tokens, int) or tokens <= 0:  # some endpoints do not count
            tokens = (len(json.dumps(body)) + len(text)) // CHARACTERS_A_TOKEN
        self.budget.spend(tokens)
        meter.add("judge/tokens", tokens)
        return text


class Budget:
    """Limits on requests and tokens; None is no limit. Requests under way may exceed the limit of tokens.

    What was spent is counted in `file`, which all ranks of a run share and a resumed run reads again, or in memory.
    """

    def __init__(self, max_requests: int | None, max_tokens: int | None, file: Path | None = None) -> None:
        self.limits = {"requests": max_requests, "tokens": max_tokens}
        self.file = file
        self._spent = dict.fromkeys(self.limits, 0)
        self._counting = threading.Lock()

    def take(self) -> bool:
        """Count a request. Return False if there is none left."""
        with self._locked() as spent:
            if any(limit is not None and spent[name] >= limit for name, limit in self.limits.items()):
                return False
            spent["requests"] += 1
            return True

    def spend(self, tokens: int) -> None:
        with self._locked() as spent:
            spent["tokens"] += tokens

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[str, int]]:
        """Give what was spent to one thread of one rank at a time, and write down what it makes of it."""
        with self._counting:
            if self.file is None:
                yield self._spent
                return
            with open(os.open(self.file, os.O_RDWR | os.O_CREAT, 0o666), "r+", encoding="utf-8") as file:
                with contextlib.suppress(OSError):  # a file system without locks, of which a warning has been given
                    fcntl.flock(file, fcntl.LOCK_EX)
                self._spent |= self._read(file)
                yield self._spent
                file.seek(0)
                json.dump(self._spent, file)  # never shorter than before

    def _read(self, file: IO[str]) -> dict[str, int]:
        """Return what the file counts. A run that cannot know what it has spent must not go on spending."""
        try:
            spent: dict[str, int] = json.loads(file.read() or "{}")
            if all(type(spent.get(name, 0)) is int for name in self.limits) and spent.keys() <= self.limits.keys():
                return spent
        except (ValueError, AttributeError, RecursionError):
            pass
        raise CheckpointError(
            self.file,
            "it cannot be read, and it counts what the judge was asked for",
            "Restore it, or delete it to count from 0",
        )


class Cache:
    """Keeps each reply in a small file, written atomically, so that several processes may share it, also over NFS."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"reward.judge.cache={folder}", f"it cannot be made: {error}", "Name a folder you may write to, or null"
            ) from None

    def get(self, name: str) -> str | None:
        try:
            text = json.loads(self._path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there, or cut short by a power failure
            return None
        return text if isinstance(text, str) else None

    def put(self, name: str, text: str) -> None:
        with contextlib.suppress(OSError):  # a full disk makes the next run pay again but does not end this one
            self._path(name).parent.mkdir(exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self.folder, suffix=".part", delete=False) as file:
                json.dump(text, file)
            disk.follow_umask(Path(file.name))
            os.replace(file.name, self._path(name))

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / f"{name}.json"
