"""step: one update of the policy, from the rows of a step to the optimizer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from trainer.batch.pack import Packer, halves, rows_of_answer, tokens_in
from trainer.config.settings import Algorithm, Config
from trainer.errors import TrainingError
from trainer.loss import before_update
from trainer.loss.before_update import TeacherLogprobs
from trainer.loss.objectives import Coefficient, objective, tally_batch, total
from trainer.machine.out_of_memory import until_it_fits
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import MeasuredBatch, MiniBatch, ScoredGroup, TrainingBatch, TrainingRow, Update
from trainer.watch.tally import Tally

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Updater:
    """Trains the policy on the rows of a step, in smaller micro-batches if memory runs out. The result is the same
    up to rounding, because the loss is a sum over micro-batches."""

    policy: Policy
    config: Config
    device: Any
    packer: Packer
    kl: Coefficient
    warn: Callable[[str], None]
    give_back: Sequence[Callable[[], bool]] = ()  # `Sampler.give_back` of each sampler
    teacher: TeacherLogprobs | None = None

    def penalise(self, groups: Sequence[ScoredGroup], tally: Tally) -> list[ScoredGroup]:
        """Subtract the KL to the reference, times its coefficient, from each reward, if `algorithm.kl.where=reward`."""
        coef = self.kl.value
        if not coef or self.config.algorithm.kl.where != "reward":
            return list(groups)
        answers = [[rows_of_answer(group, one) if one.tokens else [] for one in group.completions] for group in groups]
        estimator = self.config.algorithm.kl.estimator

        def measure(batches: Sequence[TrainingBatch]) -> dict[int, float]:
            pairs = ((one, before_update.divergences(self.policy, one.to(self.device), estimator)) for one in batches)
            return {id(row): kl for batch, of_rows in pairs for row, kl in zip(batch.rows, of_rows, strict=True)}

        with self.policy.gathered():  # the ranks have different numbers of rows
            rows = [row for rows_G in answers for rows in rows_G for row in rows]
            kl_of = self.until_it_fits(measure, self.packer.pack(rows))
        penalised = []
        for group, rows_G in zip(groups, answers, strict=True):
            kl_G = [sum(kl_of[id(row)] for row in rows) for rows in rows_G]
            tally.add("kl", sum(kl_G), sum(completion.length for completion in group.completions))
            pairs = zip(group.scores, kl_G, strict=True)
            lower = (one if one.reward is None else replace(one, reward=one.reward - coef * kl) for one, kl in pairs)
            penalised.append(replace(group, scores=tuple(lower)))
        return penalised

    def held_out_loss(self, rows: Sequence[TrainingRow]) -> float | None:
        """Return the mean cross-entropy of the tokens of solutions. Every rank calls it with all rows."""
        rows = distributed.mine(rows)

        @torch.no_grad()
        def log_likelihood(batches: Sequence[TrainingBatch]) -> float:
            on_device = (batch.to(self.device) for batch in batches)
            return sum(float(self.policy.measure(one).logprobs_BT.sum()) for one in on_device)

        sums = self.until_it_fits(log_likelihood, self.packer.pack(rows)), tokens_in(rows)
        likelihood, tokens = map(sum, zip(*distributed.gather(sums), strict=True))
        return -likelihood / tokens if tokens else None

    def until_it_fits(self, work: Callable[[Sequence[TrainingBatch]], T], batches: Sequence[TrainingBatch]) -> T:
        """Return `work(batches)`. If memory runs out, repeat it with smaller batches."""

        def make_room() -> None:
            nonlocal batches
            batches = self.shrink(batches)

        return until_it_fits(lambda: work(batches), make_room)

    def shrink(self, batches: Sequence[TrainingBatch]) -> Sequence[TrainingBatch]:
        """Return the batches for the next attempt: the same ones if samplers free memory that they keep between
        rollouts, or smaller ones, which are packed from now on as well. Raise TrainingError if none can be split."""
        self.policy.start_over()  # an interrupted backward pass has added only a part of its gradient
        given_back = [give_back() for give_back in self.give_back]
        if any(given_back):
            self.warn("out of memory in training: sampling now frees its memory after each step")
            return batches
        costs = [self.packer.cost_of(batch.rows) for batch in batches]
        smaller = max(costs) // 2
        splits = [len(batch.rows) > 1 and cost > smaller for batch, cost in zip(batches, costs, strict=True)]
        if not any(splits):
            reason = f"not even one answer fits into memory in a training pass (it counts as {max(costs)} tokens)"
            remedy = "Write a smaller rollout.max_new_tokens or prompt.max_tokens, model.gradient_checkpointing=true, "
            remedy += "or the name of a smaller model"
            raise TrainingError(f"optim.tokens_per_micro_batch={self.packer.token_budget}", reason, remedy)
        self.warn(
            f"optim.tokens_per_micro_batch={self.packer.token_budget}: out of memory with {max(costs)} tokens; "
            f"repeating with half as many. Write optim.tokens_per_micro_batch={smaller} to start with that."
        )
        self.packer.token_budget = smaller
        pairs = zip(batches, splits, strict=True)
        return [part for batch, is_split in pairs for part in (halves(batch) if is_split else [batch])]

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """Return the mini-batches on the device, with the inputs of the objective (`loss/before_update.py`)."""

        def measure(is_first: bool, batches: Sequence[TrainingBatch]) -> list[TrainingBatch]:
            on_device = [batch.to(self.device) for batch in batches]
            return before_update.prepared(self.policy, on_device, self.config, is_first, self.teacher)

        return [
            replace(one, batches=self.until_it_fits(partial(measure, index == 0), one.batches))
            for index, one in enumerate(minibatches)
        ]

    def update(self, prepared: Sequence[MiniBatch], step: int, tally: Tally) -> list[Update]:
        """Update the policy once per mini-batch, in `algorithm.epochs` passes over all mini-batches."""
        minibatches = [minibatch for minibatch in prepared if minibatch.tokens]
        updates = []
        for _ in range(self.config.algorithm.epochs):
            for index in range(len(minibatches)):
                gradient = partial(self.add_gradient, minibatches, index, tally)
                updates.append(self.policy.update(gradient, step))
        return updates

    def add_gradient(self, minibatches: list[MiniBatch], index: int, tally: Tally) -> None:
        """Accumulate the gradient of a mini-batch, in smaller micro-batches if memory runs out. Replace the mini-batch
        by one with the old log-probs, which the first pass computes."""

        def attempt(batches: Sequence[TrainingBatch]) -> tuple[MiniBatch, Tally]:
            minibatch, measured = replace(minibatches[index], batches=batches), Tally()
            return backward(self.policy, minibatch, self.config.algorithm, self.kl.value, measured), measured

        minibatches[index], measured = self.until_it_fits(attempt, minibatches[index].batches)
        tally.merge(measured.sums)  # only of the attempt that succeeded

    def adapt_kl(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Adapt the coefficient of the KL to the measured KL. Return the one that this step used, for the log."""
        if "kl" not in metrics:
            return {}
        used = self.kl.value
        self.kl.observe(metrics["kl"])
        return {"kl_coef": used}


def backward(policy: Policy, minibatch: MiniBatch, settings: Algorithm, kl_coef: float, tally: Tally) -> MiniBatch:
    """Accumulate the gradient of the loss, and return the mini-batch with the old log-probs. If it has none, this is
    the first pass, before the first update, and its log-probs are the old ones."""
    measured = []
    for batch in minibatch.batches:
        scores = policy.score(batch)
        known = batch if isinstance(batch, MeasuredBatch) else batch.measured(scores.logprobs_BT.detach())
        loss = total(objective(scores, known, settings, kl_coef), known, minibatch.divisor)
        policy.backward(loss)
        if not policy.is_displaced:
            tokens = tally_batch(tally, known, scores, settings)
            tally.add("loss", loss.item(), tokens / minibatch.tokens)
        measured.append(known)
    return replace(minibatch, batches=measured)
