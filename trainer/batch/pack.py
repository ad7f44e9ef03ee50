"""batch: rows of tokens, right-packed into micro-batches. This is the only file that shifts.

A row is prompt + completion. Inputs are all but its last token, targets all but its first, so position t predicts
`targets_BT[:, t]`, and everything in a `TrainingBatch` is aligned to the targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.batch.aggregation import AGGREGATIONS
from trainer.config.settings import Algorithm, Config
from trainer.ranks import distributed
from trainer.records import Completion, MiniBatch, ScoredGroup, TrainingBatch, TrainingRow, Tree


class GroupRows(NamedTuple):
    """The rows of one group, its part of the divisor, and its index among the groups of all ranks."""

    rows: list[TrainingRow]
    size: float
    place: int


def rows_of(group: ScoredGroup, advantages_G: Sequence[float | None], settings: Algorithm, place: int = 0) -> GroupRows:
    """Return the completions of a group as rows, without those that have no reward or are masked."""
    kept = [
        (completion, score.reward, advantage)
        for completion, score, advantage in zip(group.completions, group.scores, advantages_G, strict=True)
        if score.reward is not None
        and advantage is not None
        and not (completion.truncated and settings.truncated == "mask")
    ]
    if not kept:
        return GroupRows([], 0.0, place)
    weights_G, size = AGGREGATIONS[settings.aggregation]([completion.length for completion, *_ in kept])
    rows = [
        row_of(group, completion, advantage, reward, weight)
        for (completion, reward, advantage), weight in zip(kept, weights_G, strict=True)
    ]
    return GroupRows(rows, size, place)


def row_of(
    group: ScoredGroup, completion: Completion, advantage: float = 0.0, reward: float = 0.0, weight: float = 1.0
) -> TrainingRow:
    """Return a completion of a group as a row."""
    tokens, logprobs, written = completion.tokens, completion.logprobs, completion.written
    return TrainingRow(group.prompt.tokens, tokens, logprobs, advantage, reward, weight, written)


def rows(
    groups: Mapping[int, ScoredGroup], advantages: Sequence[Sequence[float | None]], settings: Algorithm
) -> list[GroupRows]:
    """Return the rows of this rank's groups, which are given by their index on this rank.

    Problems are dealt to the ranks in turn, so the index among all ranks follows from that on this one.
    """
    return [
        rows_of(group, advantages_G, settings, index * distributed.world_size() + distributed.rank())
        for (index, group), advantages_G in zip(groups.items(), advantages, strict=True)
    ]


def minibatches(groups: Sequence[GroupRows], idle: TrainingRow, config: Config, packer: Packer) -> list[MiniBatch]:
    """Deal the rows of this rank out over the updates of one pass; every rank has as many micro-batches per update.

    A rank with fewer micro-batches than the others adds a row without weight, because they wait for it. The groups of
    all ranks are dealt in turn by their place, so an update has the same groups however many ranks there are.
    """
    dealt = _deal([group for group in groups if group.rows], config.algorithm.minibatches)
    packed = [packer.pack(all_rows(part)) for part in dealt]
    facts = [_sizes(part, len(batches)) for part, batches in zip(dealt, packed, strict=True)]
    made = []
    for batches, of_all_ranks in zip(packed, zip(*distributed.gather(facts), strict=True), strict=True):
        counts, sizes, tokens = zip(*of_all_ranks, strict=True)
        fillers = packer.pack([idle]) * (max(counts) - len(batches))
        divisor = config.constant_divisor if config.algorithm.aggregation == "dr_grpo" else sum(sizes)
        made.append(MiniBatch([*batches, *fillers], divisor, float(sum(tokens))))
    return made


def _deal(groups: Sequence[GroupRows], count: int) -> list[list[GroupRows]]:
    """Return the groups of this rank for each of `count` updates."""
    places = distributed.gather([group.place for group in groups])
    turn = {
        place: index % count for index, place in enumerate(sorted(place for of_rank in places for place in of_rank))
    }
    return [[group for group in groups if turn[group.place] == update] for update in range(count)]


def _sizes(groups: Sequence[GroupRows], batches: int) -> tuple[int, float, int]:
    """Return what this rank brings to an update: micro-batches, its part of the divisor, and trained tokens."""
    return batches, sum(group.size for group in groups), sum(sum(row.mask) for row in all_rows(groups))


def all_rows(groups: Sequence[GroupRows]) -> list[TrainingRow]:
    """Return the rows of all groups."""
    return [row for group in groups for row in group.rows]


@dataclass(slots=True)
class Packer:
    """Packs rows into micro-batches of at most `token_budget` tokens (or one row), the longest rows first.

    If the model works on a line of tokens (`loss/shared_prefix.py`), answers to the same prompt stay together and the
    prompt counts once. Inside the attention, though, each answer has the keys and values of its whole row, which take
    an eighth of the memory of a token in all layers. Otherwise rows of similar length go together, and padding counts.
    `token_budget` shrinks when memory runs out (`batch/shrinker.py`).
    """

    token_budget: int
    pad_token: int
    flat: bool = True

    def pack(self, rows: Sequence[TrainingRow]) -> list[TrainingBatch]:
        return [to_tensors([rows[index] for index in indices], self.pad_token) for indices in self.arrange(rows)]

    def arrange(self, rows: Sequence[TrainingRow]) -> list[list[int]]:
        """Return the indices of the rows of each micro-batch."""
        batches: list[list[int]] = []
        used = 0
        for index in self._order(rows):
            used = self._with_one_more(used, [rows[one] for one in batches[-1]], rows[index]) if batches else 0
            if not batches or used > self.token_budget:
                batches.append([])
                used = rows[index].length + self._keys(rows[index])
            batches[-1].append(index)
        return batches

    def cost_of(self, batch: TrainingBatch) -> int:
        """Return how much of the budget a micro-batch takes."""
        rows = rows_in(batch)
        used = rows[0].length + self._keys(rows[0])
        for index, row in enumerate(rows[1:], 1):
            used = self._with_one_more(used, rows[:index], row)
        return used

    def _order(self, rows: Sequence[TrainingRow]) -> list[int]:
        longest: dict[tuple[int, ...], int] = {}
        for row in rows:
            longest[tuple(row.prompt)] = max(row.length, longest.get(tuple(row.prompt), 0))

        def by_group(index: int) -> tuple[int, tuple[int, ...], int]:
            row = rows[index]
            return longest[tuple(row.prompt)], tuple(row.prompt), row.length

        key = by_group if self.flat else lambda index: rows[index].length
        return sorted(range(len(rows)), key=key, reverse=True)

    def _with_one_more(self, used: int, batch: Sequence[TrainingRow], row: TrainingRow) -> int:
        """Return the cost of a micro-batch with one more row. With padding, all rows count as long as the first."""
        if not self.flat:
            return (len(batch) + 1) * batch[0].length
        new = len(row.completion) if row.prompt == batch[-1].prompt else row.length
        return used + new + self._keys(row)

    def _keys(self, row: TrainingRow) -> int:
        return row.length // 8 if self.flat else 0


def to_tensors(rows: Sequence[TrainingRow], pad_token: int) -> TrainingBatch:
    """Return rows as one micro-batch, right-padded and shifted."""
    width = max(row.length for row in rows) - 1
    tokens = [[*row.prompt, *row.completion] for row in rows]
    before = [len(row.prompt) - 1 for row in rows]
    return TrainingBatch(
        inputs_BT=_pad([row[:-1] for row in tokens], width, pad_token),
        targets_BT=_pad([row[1:] for row in tokens], width, pad_token),
        mask_BT=_pad([[False] * n + [*row.mask] for n, row in zip(before, rows)], width, False),
        sampled_logprobs_BT=_pad([[0.0] * n + [*row.logprobs] for n, row in zip(before, rows)], width, 0.0),
        advantages_B=torch.tensor([row.advantage for row in rows]),
        rewards_B=torch.tensor([row.reward for row in rows]),
        weights_B=torch.tensor([row.weight for row in rows]),
        tree=tree_of(rows, width),
    )


def tree_of(rows: Sequence[TrainingRow], width: int) -> Tree:
    """Number tokens by what stands before them, so that rows which begin alike share numbers."""
    numbers: dict[tuple[int, int], int] = {}  # (number of what stands before, token) -> number
    prompts: dict[tuple[int, ...], int] = {}
    line, edges = _Numbering(width), _Numbering(width)
    for index, row in enumerate(rows):
        prompts.setdefault(tuple(row.prompt), index)
        path, before = [], -1
        for token in (*row.prompt, *row.completion):
            before = numbers.setdefault((before, token), len(numbers))
            path.append(before)
        line.add(index, 0, path[:-1])
        edges.add(index, len(row.prompt) - 1, path[len(row.prompt) :], row.mask)
    first_B = torch.tensor([prompts[tuple(row.prompt)] for row in rows])
    return Tree(line.index_BT(), torch.tensor(line.first), edges.index_BT(), torch.tensor(edges.first), first_B)


class _Numbering:
    """Gives numbers in the order in which things are seen first, row by row."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.first: list[int] = []  # of the B x T places
        self._seen: dict[int, int] = {}
        self._rows: list[list[int]] = []

    def add(self, row: int, start: int, path: Sequence[int], mask: Sequence[bool] | None = None) -> None:
        """Number what a row has from `start` on, where the mask says so."""
        places = [0] * start
        for offset, number in enumerate(path, start):
            if mask is not None and not mask[offset - start]:
                places.append(0)
                continue
            if number not in self._seen:
                self._seen[number] = len(self.first)
                self.first.append(row * self.width + offset)
            places.append(self._seen[number])
        self._rows.append(places)

    def index_BT(self) -> Tensor:
        return _pad(self._rows, self.width, 0)


def halves(batch: TrainingBatch) -> list[TrainingBatch]:
    """Split a batch into two, with everything that has been measured."""
    rows = rows_in(batch)
    middle = len(rows) // 2
    assert middle, "one row is not divided"
    return [_part(batch, rows[part], part) for part in (slice(0, middle), slice(middle, None))]


def rows_in(batch: TrainingBatch) -> list[TrainingRow]:
    """Return the tokens of each row. What else is known about them stays in the batch."""
    rows = []
    for inputs, targets, mask in zip(batch.inputs_BT.tolist(), batch.targets_BT.tolist(), batch.mask_BT.tolist()):
        before, end = mask.index(True), len(mask) - mask[::-1].index(True)
        completion, written = targets[before:end], mask[before:end]
        rows.append(TrainingRow(inputs[: before + 1], completion, [], advantage=0.0, written=written))
    return rows


def _part(batch: TrainingBatch, rows: Sequence[TrainingRow], part: slice) -> TrainingBatch:
    width = max(row.length for row in rows) - 1
    cut = {field.name: getattr(batch, field.name) for field in fields(batch) if field.name != "tree"}
    for name, value in cut.items():
        if value is not None:
            cut[name] = value[part, :width] if name.endswith("_BT") else value[part]
    return TrainingBatch(**cut, tree=tree_of(rows, width).to(batch.inputs_BT.device))


def _pad(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])


def idle_row(group: ScoredGroup) -> TrainingRow:
    """Return a row without weight, for a rank that has nothing to train on."""
    return row_of(group, min(group.completions, key=lambda completion: len(completion.tokens)), weight=0.0)
