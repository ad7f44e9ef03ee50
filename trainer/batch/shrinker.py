"""batch: repeat a training pass that ran out of memory, with smaller micro-batches.

The result is the same up to rounding, because the loss is a sum over micro-batches. The gradients so far are discarded,
because an interrupted backward pass has added only a part of its gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.batch.pack import Packer, halves
from trainer.errors import TrainingError
from trainer.policy import Policy
from trainer.records import Batch, TrainingBatch


@dataclass(frozen=True, slots=True)
class Shrinker:
    """First frees the memory that samplers keep between rollouts, then halves micro-batches."""

    policy: Policy
    give_back: Sequence[Callable[[], bool]]  # `Sampler.give_back` of each sampler
    packer: Packer
    warn: Callable[[str], None]

    def shrink(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches for the next attempt, and pack smaller ones from now on. Raise TrainingError if no batch
        can be split."""
        self.policy.start_over()
        given_back = [give_back() for give_back in self.give_back]
        if any(given_back):
            self.warn("out of memory in training: sampling now frees its memory after each step")
            return batches
        tried = max(self.packer.cost_of(batch.rows) for batch in batches)
        smaller = tried // 2
        if all(self._stays_whole(batch, smaller) for batch in batches):
            reason = f"not even one answer fits into memory in a training pass (it counts as {tried} tokens)"
            remedy = "Write a smaller rollout.max_new_tokens or prompt.max_tokens, model.gradient_checkpointing=true, "
            remedy += "or the name of a smaller model"
            raise TrainingError(f"optim.tokens_per_micro_batch={self.packer.token_budget}", reason, remedy)
        self.warn(
            f"optim.tokens_per_micro_batch={self.packer.token_budget}: out of memory with {tried} tokens; repeating "
            f"with half as many. Write optim.tokens_per_micro_batch={smaller} to start with that."
        )
        self.packer.token_budget = smaller
        return [part for batch in batches for part in ([batch] if self._stays_whole(batch, smaller) else halves(batch))]

    def _stays_whole(self, batch: TrainingBatch, budget: int) -> bool:
        return len(batch.rows) == 1 or self.packer.cost_of(batch.rows) <= budget
