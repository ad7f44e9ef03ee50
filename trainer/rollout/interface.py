"""What a sampler is, the policy that it samples from, and what it needs to know about a run."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.config.settings import Config
from trainer.problem.prompts import Prompter
from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.limits import Say
from trainer.rollout.turns import Stops, TurnTaking

Groups = Iterator[tuple[int, list[Completion]]]  # the index of a prompt, and its completions


class Sampler(Protocol):
    """Samples a group for each prompt, and yields each group as soon as it is finished."""

    owns_copy: bool = False
    """True if the sampler has its own copy of the model, which may differ from the one that is trained."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Groups: ...

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Find out how many rows fit into memory if the prompts and their answers have the maximum length."""
        return

    def longest(self, prompt: Prompt) -> Prompt:
        """Return the longest prompt that the model may have to answer, given the longest prompt of the data."""
        return prompt

    def give_back(self) -> bool:
        """Free the memory that is kept between rollouts, and keep none from now on. Return whether any was freed."""
        return False

    def context_limit(self) -> int | None:
        """Return the maximum length of a prompt with its answer, or None if only the model limits it."""
        return None

    def frozen(self) -> "Sampler":
        """Return a sampler that keeps the current policy when the policy is updated. Every rank calls it."""
        return self

    def each(self) -> "Mapping[str, Sampler]":
        """Return the samplers that share the work, by name, so that each can be checked. Every rank calls it."""
        return {"sampler": self}

    def close(self) -> None:
        """Stop the servers and threads that the sampler has started."""
        return


class Exportable(Protocol):
    """A policy that can be written to disk: the one that is trained, or a `StaticPolicy`."""

    @property
    def version(self) -> int | None:
        """The number of updates of the weights in use, or None if they are those of the base model."""

    def write_model(self, folder: Path) -> None:
        """Write the policy in a format that other programs read. Only rank 0 calls it."""


@dataclass(slots=True)
class StaticPolicy:
    """A policy that is not trained: the base model, or an adapter in a folder."""

    adapter: Path | None = None

    @property
    def version(self) -> int | None:
        return None if self.adapter is None else 0

    def write_model(self, folder: Path) -> None:
        assert self.adapter is not None, "the base model is never published"
        shutil.copytree(self.adapter, folder)


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What a sampler needs to know about a run."""

    config: Config
    policy: Exportable
    location: str  # of the base model: a folder, or a name on the hub
    dtype: str
    context_length: int  # maximum number of tokens in a prompt with its answer
    stops: Stops
    folder: Path  # for published adapters and logs
    say: Say
    prompter: Prompter | None = None
    vocabulary: int = 1 << 31  # number of tokens with an embedding

    @property
    def turns(self) -> TurnTaking:
        return TurnTaking(self.stops, self.prompter, self.config.rollout.turns)
