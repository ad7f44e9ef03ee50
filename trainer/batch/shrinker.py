"""batch: repeat a training pass that ran out of memory, with smaller micro-batches.

The result is the same up to rounding, because a micro-batch is only a share of a sum. What was added up before memory
ran out is forgotten: a backward pass that broke off has left a part of its gradient behind.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.batch.pack import Packer, halves
from trainer.errors import TrainingError
from trainer.policy import Policy
from trainer.records import Batch, TrainingBatch


@dataclass(frozen=True, slots=True)
class Shrinker:
    """Frees the memory that samplers keep between rollouts first, then halves micro-batches."""

    policy: Policy
    give_back: Sequence[Callable[[], bool]]  # of each sampler; False if it keeps nothing between rollouts
    packer: Packer
    warn: Callable[[str], None]

    def shrink(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches to try again with, and have smaller ones packed from now on; raise if none can shrink."""
        self.policy.start_over()
        given_back = [give_back() for give_back in self.give_back]
        if any(given_back):
            kept = "what sampling kept from one step to the next is given back after each"
            self.warn(f"out of memory in training: {kept}")
            return batches
        tried = max(self.packer.cost_of(batch.rows) for batch in batches)
        smaller = tried // 2
        if all(self._stays_whole(batch, smaller) for batch in batches):
            reason = f"not even one answer fits into memory in a training pass (it counts as {tried} tokens)"
            remedy = "Write a smaller rollout.max_new_tokens or prompt.max_tokens, model.gradient_checkpointing=true, "
            remedy += "or the name of a smaller model"
            raise TrainingError(f"optim.tokens_per_micro_batch={self.packer.token_budget}", reason, remedy)
        self.warn(
            f"optim.tokens_per_micro_batch={self.packer.token_budget}: out of memory with {tried} tokens; the same "
            f"answers go on in halves. Write optim.tokens_per_micro_batch={smaller} to begin with that."
        )
        self.packer.token_budget = smaller
        return [part for batch in batches for part in ([batch] if self._stays_whole(batch, smaller) else halves(batch))]

    def _stays_whole(self, batch: TrainingBatch, budget: int) -> bool:
        return len(batch.rows) == 1 or self.packer.cost_of(batch.rows) <= budget
