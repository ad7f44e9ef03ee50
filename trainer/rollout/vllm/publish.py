"""What both engines of vLLM have in common: what is asked of it, and what it reads of the policy.

Every version of the policy is a folder with a name, which appears whole and is never used again.

vLLM keeps what it has computed by the name and the path of an adapter, not by its content. A name or a path that comes
again is answered with status 200 and the old policy's tokens, so nothing here can express that.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.config.settings import Config
from trainer.machine import disk
from trainer.ranks import distributed
from trainer.rollout.limits import Say
from trainer.run_folder import claim


class Source(Protocol):
    """The policy, as far as a program outside has to know it."""

    @property
    def version(self) -> int | None:
        """Updates behind what the model computes now; None while that is the base."""

    def export(self, folder: Path) -> None:
        """Write it for other programs. Rank 0 calls it."""


# Whatever the model's own generation config says: nothing bends the distribution.
NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_tokens": 0}
NEUTRAL |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def seed_of(seed: int, index: int) -> int:
    """Of a group, far from those of the others: vLLM gives the answers of a group the seeds that follow."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class Outside:
    """What an engine that has its own copy of the model has to know of a run."""

    config: Config
    source: Source
    location: str  # of the base: a folder, or a name on the hub
    dtype: str
    context: int  # tokens of the longest prompt with its answer
    tokenizer: Any
    stop_tokens: Sequence[int]
    folder: Path  # for what is published, and for logs
    say: Say


@dataclass(frozen=True, slots=True)
class Published:
    """One version of the policy, where others can read it."""

    name: str
    path: Path
    version: int | None


class Publisher:
    """Writes versions into a folder. A folder is deleted one version late: an engine may read it again until then."""

    def __init__(self, folder: Path) -> None:
        run = f"octet-{secrets.token_hex(4)}"  # a restarted run must not meet the names of the one before
        self.run, self.folder = distributed.gather((run, folder.resolve()))[0]
        self._kept: list[Published] = []
        self._count = 0
        if distributed.is_main() and claim.is_ours(folder.parent):
            shutil.rmtree(self.folder, ignore_errors=True)  # an earlier start of this run was killed

    def publish(self, source: Source, version: int | None) -> Published:
        """Every rank calls it. The base is published only where a whole model is trained, and may come back."""
        self._count += 1
        name = f"{self.run}-{self._count}-" + ("base" if version is None else f"v{version}")
        published = Published(name, self.folder / name, version)
        if distributed.is_main():
            partial = published.path.with_suffix(".tmp")
            with disk.writing(partial, "the policy for vLLM", "Make room; the same command then goes on."):
                source.export(partial)
            partial.rename(published.path)
        self._kept.append(published)
        if len(self._kept) > 2:
            self._delete(self._kept.pop(0))
        distributed.barrier()
        return published

    def close(self) -> None:
        """Nobody reads any of it from here on."""
        while self._kept:
            self._delete(self._kept.pop())
        if distributed.is_main():
            with suppress(OSError):  # another run's, or none was made
                self.folder.rmdir()

    def _delete(self, published: Published) -> None:
        if distributed.is_main():
            shutil.rmtree(published.path, ignore_errors=True)


@dataclass(slots=True)
class Fixed:
    """A policy that is not trained: the base, or an adapter in a folder."""

    adapter: Path | None = None

    @property
    def version(self) -> int | None:
        return None if self.adapter is None else 0

    def export(self, folder: Path) -> None:
        assert self.adapter is not None, "a base is not published"
        shutil.copytree(self.adapter, folder)
