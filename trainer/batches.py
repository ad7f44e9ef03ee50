"""batch: rows of tokens, right-packed into micro-batches. The only file that shifts.

A row is prompt + completion. Inputs are all but its last token, targets all but its first, so position t predicts
`targets_BT[:, t]`, and everything in a `TrainingBatch` is aligned to the targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trainer.advantages import advantages_of
from trainer.types import ScoredGroup, TrainingBatch, TrainingRow


def rows_of(groups: Iterable[ScoredGroup], method: str) -> list[TrainingRow]:
    """The completions of the groups with their advantages; those without a reward are left out."""
    return [
        TrainingRow(group.prompt.tokens, completion.tokens, completion.logprobs, advantage)
        for group in groups
        for completion, advantage in zip(group.completions, advantages_of(group.rewards_G, method), strict=True)
        if advantage is not None
    ]


def pack(rows: Sequence[TrainingRow], token_budget: int, pad_token: int) -> list[TrainingBatch]:
    """Micro-batches of at most `token_budget` padded tokens (or one row), of rows of similar length."""
    batches: list[list[TrainingRow]] = []
    for row in sorted(rows, key=lambda row: row.length, reverse=True):  # the first row of a batch is its longest
        if batches and (len(batches[-1]) + 1) * batches[-1][0].length <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return [to_tensors(batch, pad_token) for batch in batches]


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
    )


def _pad(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def idle_row(group: ScoredGroup) -> TrainingRow:
    """A row without weight, for a rank with nothing to train on: the others wait for its part of the reduction."""
    shortest = min(group.completions, key=lambda completion: len(completion.tokens))
    return TrainingRow(group.prompt.tokens, shortest.tokens, shortest.logprobs, advantage=0.0)
