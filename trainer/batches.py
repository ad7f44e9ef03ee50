"""batch: rows of tokens, right-packed into micro-batches. The only file that shifts.

A row is prompt + completion. Inputs are all but its last token, targets all but its first, so position t predicts
`targets_BT[:, t]`, and everything in a `TrainingBatch` is aligned to the targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainer import distributed
from trainer.advantages import advantages_of
from trainer.aggregation import AGGREGATIONS
from trainer.config import Algorithm, Config
from trainer.types import MiniBatch, ScoredGroup, TrainingBatch, TrainingRow


class GroupRows(NamedTuple):
    """The rows of one group, and its part of the divisor."""

    rows: list[TrainingRow]
    size: float


def rows_of(group: ScoredGroup, settings: Algorithm, step_deviation: float = 0.0) -> GroupRows:
    """The completions of a group with their advantages, without those that have no reward or are masked."""
    advantages = advantages_of(group.rewards_G, settings, step_deviation)
    kept = [
        (completion, score.reward, advantage)
        for completion, score, advantage in zip(group.completions, group.scores, advantages, strict=True)
        if score.reward is not None
        and advantage is not None
        and not (completion.truncated and settings.truncated == "mask")
    ]
    if not kept:
        return GroupRows([], 0.0)
    weights_G, size = AGGREGATIONS[settings.aggregation]([len(completion.tokens) for completion, *_ in kept])
    rows = [
        TrainingRow(group.prompt.tokens, completion.tokens, completion.logprobs, advantage, reward, weight)
        for (completion, reward, advantage), weight in zip(kept, weights_G, strict=True)
    ]
    return GroupRows(rows, size)


def minibatches(groups: Sequence[GroupRows], idle: TrainingRow, config: Config, pad_token: int) -> list[MiniBatch]:
    """The rows of this rank, dealt out over the updates of a pass; each update has as many micro-batches on all ranks.

    A rank with fewer than the others fills up with a row without weight: they wait for its part.
    """
    count = config.algorithm.minibatches
    dealt = [groups[index::count] for index in range(count)]
    packed = [pack(all_rows(part), config.optim.tokens_per_micro_batch, pad_token) for part in dealt]
    facts = [_facts(part, len(batches)) for part, batches in zip(dealt, packed, strict=True)]
    made = []
    for batches, of_all_ranks in zip(packed, zip(*distributed.gather(facts), strict=True), strict=True):
        counts, sizes, tokens = zip(*of_all_ranks, strict=True)
        fillers = [to_tensors([idle], pad_token)] * (max(counts) - len(batches))
        divisor = config.constant_divisor if config.algorithm.aggregation == "dr_grpo" else sum(sizes)
        made.append(MiniBatch([*batches, *fillers], divisor, float(sum(tokens))))
    return made


def _facts(groups: Sequence[GroupRows], batches: int) -> tuple[int, float, int]:
    """Of one rank: micro-batches, its part of the divisor, completion tokens."""
    return batches, sum(group.size for group in groups), sum(len(row.completion) for row in all_rows(groups))


def all_rows(groups: Sequence[GroupRows]) -> list[TrainingRow]:
    return [row for group in groups for row in group.rows]


def pack(rows: Sequence[TrainingRow], token_budget: int, pad_token: int) -> list[TrainingBatch]:
    """Micro-batches of at most `token_budget` padded tokens (or one row), of rows of similar length."""
    arranged = arrange([row.length for row in rows], token_budget)
    return [to_tensors([rows[index] for index in indices], pad_token) for indices in arranged]


def arrange(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Which rows go together, the longest first."""
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and (len(batches[-1]) + 1) * longest <= token_budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def to_tensors(rows: Sequence[TrainingRow], pad_token: int) -> TrainingBatch:
    width = max(row.length for row in rows) - 1
    tokens = [[*row.prompt, *row.completion] for row in rows]
    before = [len(row.prompt) - 1 for row in rows]
    return TrainingBatch(
        inputs_BT=_pad([row[:-1] for row in tokens], width, pad_token),
        targets_BT=_pad([row[1:] for row in tokens], width, pad_token),
        mask_BT=_pad([[0] * n + [1] * len(row.completion) for n, row in zip(before, rows)], width, 0).bool(),
        sampled_logprobs_BT=_pad([[0.0] * n + [*row.logprobs] for n, row in zip(before, rows)], width, 0.0),
        advantages_B=torch.tensor([row.advantage for row in rows]),
        rewards_B=torch.tensor([row.reward for row in rows]),
        weights_B=torch.tensor([row.weight for row in rows]),
    )


def _pad(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def idle_row(group: ScoredGroup) -> TrainingRow:
    """A row without weight, for a rank with nothing to train on."""
    shortest = min(group.completions, key=lambda completion: len(completion.tokens))
    return TrainingRow(group.prompt.tokens, shortest.tokens, shortest.logprobs, advantage=0.0, weight=0.0)
