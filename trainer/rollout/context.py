"""What samplers know of a run and of the policy that they sample from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.config.settings import Config
from trainer.problem.prompts import Prompter
from trainer.rollout.limits import Say
from trainer.rollout.turns import Stops, TurnTaking


class Exportable(Protocol):
    """A policy that can be written to disk: the one that is trained, or a `StaticPolicy`."""

    @property
    def version(self) -> int | None:
        """The number of updates behind what the model computes now, or None while it computes the base."""

    def write_model(self, folder: Path) -> None:
        """Write it in a format that other programs read. Only rank 0 calls it."""


@dataclass(slots=True)
class StaticPolicy:
    """A policy that is not trained: the base model, or an adapter in a folder."""

    adapter: Path | None = None

    @property
    def version(self) -> int | None:
        return None if self.adapter is None else 0

    def write_model(self, folder: Path) -> None:
        assert self.adapter is not None, "a base is not published"
        shutil.copytree(self.adapter, folder)


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What a sampler needs to know of a run."""

    config: Config
    policy: Exportable
    location: str  # of the base: a folder, or a name on the hub
    dtype: str
    context_length: int  # tokens that a prompt and its answer may have
    tokenizer: Any
    stop_tokens: Sequence[int]
    folder: Path  # for published versions and logs
    say: Say
    stop_strings: Sequence[str] = ()
    prompter: Prompter | None = None

    @property
    def turns(self) -> TurnTaking:
        stops = Stops(self.tokenizer, self.stop_tokens, self.stop_strings)
        return TurnTaking(stops, self.prompter, self.config.rollout.turns)
