"""When memory runs out: less at a time, and what was under way is done again.

The result is the same up to rounding, because a micro-batch is only a share of a sum. What was added up before memory
ran out is forgotten: a backward pass that broke off has left a part of its gradient behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.batch.pack import Packer, halves
from trainer.errors import TrainingError
from trainer.records import MiniBatch, TrainingBatch


class GivesBack(Protocol):
    def give_back(self) -> bool:
        """Free what is kept between rollouts, from now on after each of them. False where nothing was left to free."""


class StartsOver(Protocol):
    def start_over(self) -> None:
        """Forget what backward passes have added up since the update began."""


@dataclass(frozen=True, slots=True)
class Room:
    """Where a training pass finds memory when it has none: what the sampler keeps, then half of a micro-batch."""

    policy: StartsOver
    samplers: Sequence[GivesBack]
    packer: Packer
    say: Callable[[str], None]

    def make(self, minibatches: Sequence[MiniBatch] = ()) -> None:
        """For these, whose micro-batches are halved in place, and for all that are packed from now on."""
        self.policy.start_over()
        given_back = [sampler.give_back() for sampler in self.samplers]
        if any(given_back):
            self.say("out of memory in training: what sampling kept from one step to the next is given back after each")
            return
        batches = [batch for minibatch in minibatches for batch in minibatch.batches]
        tried = max(map(self.packer.cost_of, batches), default=self.packer.token_budget)
        smaller = tried // 2
        if not smaller or (batches and all(self._stays_whole(batch, smaller) for batch in batches)):
            raise TrainingError(
                f"optim.tokens_per_micro_batch={self.packer.token_budget}: not even one answer fits into memory in a "
                f"training pass (it counts as {tried} tokens). Write a smaller rollout.max_new_tokens or "
                "prompt.max_tokens, model.gradient_checkpointing=true, or the name of a smaller model."
            )
        self.say(
            f"optim.tokens_per_micro_batch={self.packer.token_budget}: out of memory with {tried} tokens; the same "
            f"answers go on in halves. Write optim.tokens_per_micro_batch={smaller} to begin with that."
        )
        self.packer.token_budget = smaller
        for minibatch in minibatches:
            minibatch.batches[:] = [part for batch in minibatch.batches for part in self._parts(batch, smaller)]

    def _parts(self, batch: TrainingBatch, budget: int) -> list[TrainingBatch]:
        return [batch] if self._stays_whole(batch, budget) else halves(batch)

    def _stays_whole(self, batch: TrainingBatch, budget: int) -> bool:
        return len(batch.weights_B) == 1 or self.packer.cost_of(batch) <= budget
