"""batch: what an objective has to know before the first update of a step moves the policy.

Each forward pass here is made only where its result cannot be had otherwise:

- *old log-probs* are those of the first training pass over a batch. Only a batch that is trained on after another one
  has moved the policy is scored beforehand.
- *entropies* of all tokens, where only the most uncertain of the step are trained on.
- *reference log-probs*, where the KL has a price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Protocol

import torch
from torch import Tensor

from trainer.batch.pack import Packer, to_tensors
from trainer.batch.room import Room
from trainer.config.settings import Config
from trainer.loss.kl import ESTIMATORS
from trainer.loss.logprobs import Scores
from trainer.machine.out_of_memory import until_it_fits
from trainer.ranks import distributed
from trainer.records import MiniBatch, Score, ScoredGroup, TrainingBatch, TrainingRow
from trainer.watch.tally import Tally


class Scoring(Protocol):
    """What is needed of a policy here."""

    def measure(self, batch: TrainingBatch) -> Scores:
        """Scores without gradient."""

    def as_reference(self) -> AbstractContextManager[None]: ...

    def gathered(self) -> AbstractContextManager[None]:
        """For work that differs from rank to rank."""


@dataclass(frozen=True, slots=True)
class Beforehand:
    """Scores what is trained on in a step, on a device, before it is."""

    policy: Scoring
    config: Config
    device: Any
    packer: Packer
    room: Room

    def prepare(self, minibatches: Sequence[MiniBatch]) -> list[MiniBatch]:
        """The same with what the objective needs to know, on the device."""
        return [
            until_it_fits(partial(self._prepared, one, index == 0), partial(self.room.make, [one]))
            for index, one in enumerate(minibatches)
        ]

    def _prepared(self, minibatch: MiniBatch, is_first: bool) -> MiniBatch:
        """Ranks meet after the last pass, so that one may be short of memory and begin again."""
        batches = [batch.to(self.device) for batch in minibatch.batches]
        if self.config.algorithm.kl.coef and self.config.algorithm.kl.where == "loss":
            batches = list(self._with_reference(batches))
        if self.config.algorithm.top_entropy < 1:
            batches = self._with_uncertain_tokens(batches)
        elif not is_first:
            batches = [replace(batch, old_logprobs_BT=self.policy.measure(batch).logprobs_BT) for batch in batches]
        return replace(minibatch, batches=batches)

    def _with_reference(self, batches: Sequence[TrainingBatch]) -> Iterator[TrainingBatch]:
        with self.policy.as_reference():
            for batch in batches:
                yield replace(batch, reference_logprobs_BT=self.policy.measure(batch).logprobs_BT)

    def _with_uncertain_tokens(self, batches: Sequence[TrainingBatch]) -> list[TrainingBatch]:
        scores = [self.policy.measure(batch) for batch in batches]
        entropies_N = [one.entropy_BT[batch.counted_BT].cpu() for one, batch in zip(scores, batches, strict=True)]
        least = threshold(torch.cat([torch.empty(0), *entropies_N]), self.config.algorithm.top_entropy)
        return [
            replace(batch, old_logprobs_BT=one.logprobs_BT, trained_BT=one.entropy_BT >= least)
            for one, batch in zip(scores, batches, strict=True)
        ]

    def penalised(self, groups: Sequence[ScoredGroup], coef: float, tally: Tally) -> list[ScoredGroup]:
        """The groups with `coef` x KL to the reference, summed over the tokens of an answer, taken off its reward."""
        if not coef or self.config.algorithm.kl.where != "reward":
            return list(groups)
        rows = [
            TrainingRow(group.prompt.tokens, completion.tokens, completion.logprobs, advantage=0.0)
            for group in groups
            for completion in group.completions
        ]
        with self.policy.gathered():  # ranks have more or fewer rows
            divergences = iter(until_it_fits(partial(self._divergences, rows), self.room.make))
        taken_off = []
        for group in groups:
            kl_G = [next(divergences) for _ in group.completions]
            tally.add("kl", sum(kl_G), sum(len(completion.tokens) for completion in group.completions))
            scores = tuple(_less(score, coef * kl) for score, kl in zip(group.scores, kl_G, strict=True))
            taken_off.append(replace(group, scores=scores))
        return taken_off

    def _divergences(self, rows: Sequence[TrainingRow]) -> list[float]:
        """Of each row, the KL to the reference, summed over its tokens."""
        estimate, divergences = ESTIMATORS[self.config.algorithm.kl.estimator], [0.0] * len(rows)
        for indices in self.packer.arrange(rows):
            batch = to_tensors([rows[index] for index in indices], self.packer.pad_token).to(self.device)
            ours_BT = self.policy.measure(batch).logprobs_BT
            with self.policy.as_reference():
                theirs_BT = self.policy.measure(batch).logprobs_BT
            for index, divergence in zip(indices, estimate(ours_BT - theirs_BT).sum(dim=1).tolist(), strict=True):
                divergences[index] = divergence
        return divergences


def _less(score: Score, penalty: float) -> Score:
    return score if score.reward is None else replace(score, reward=score.reward - penalty)


def threshold(entropies_N: Tensor, share: float) -> float:
    """The least entropy of the uppermost share of the tokens of all ranks."""
    everywhere_N = torch.cat(distributed.gather(entropies_N))
    if not len(everywhere_N):
        return 0.0
    return float(everywhere_N.topk(ceil(share * len(everywhere_N))).values[-1])
