"""batch: rows of tokens, padded on the right, in micro-batches. Only this file shifts tokens.

A row is prompt + completion. The inputs are all tokens except the last, the targets all except the first, so position t
predicts `targets_BT[:, t]`, and all tensors of a `TrainingBatch` are aligned to the targets.

The loss is the sum over tokens of weight x loss, divided once by a number that belongs to the whole step, and does not
depend on how the answers are split into micro-batches and over ranks.

    dapo      mean over all tokens                         weight 1                    divisor: tokens
    grpo      mean over answers of their token means       weight 1 / own length       divisor: answers
    bnpo      mean over groups of their token means        weight 1 / tokens of group  divisor: groups
    dr_grpo   sum over tokens, divided by a constant       weight 1                    divisor: maximum number of tokens

Each divisor but the last is the sum of the weights of all tokens. `bnpo` is the mean over a local batch, which must not
depend on the machine, so here it is the group of one problem, which is never split over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from trainer.config.settings import Algorithm, Config
from trainer.ranks import distributed
from trainer.records import Completion, MiniBatch, ScoredGroup, Segment, TrainingBatch, TrainingRow, Tree

# Each function returns the weights of the answers of a group, given their lengths.
AGGREGATIONS: dict[str, Callable[[Sequence[int]], list[float]]] = {
    "dapo": lambda lengths_G: [1.0 for _ in lengths_G],
    "grpo": lambda lengths_G: [1 / length for length in lengths_G],
    "bnpo": lambda lengths_G: [1 / sum(lengths_G) for _ in lengths_G],
    "dr_grpo": lambda lengths_G: [1.0 for _ in lengths_G],
}


def tokens_in(rows: Sequence[TrainingRow]) -> int:
    return sum(sum(row.mask) for row in rows)


def weight_of(rows: Sequence[TrainingRow]) -> int:
    """Return the sum of the weights of all tokens, which is a number of tokens, answers or groups."""
    return round(sum(row.weight * sum(row.mask) for row in rows))


def rows(
    groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float | None]], settings: Algorithm
) -> list[TrainingRow]:
    return [row for pair in zip(groups, advantages, strict=True) for row in rows_of(*pair, settings)]


def rows_of(group: ScoredGroup, advantages_G: Sequence[float | None], settings: Algorithm) -> list[TrainingRow]:
    """Return the completions of a group as rows, except those that have no reward, no tokens, or are masked."""
    masks = settings.truncated == "mask"
    kept = [
        (completion, advantage, reward)
        for completion, advantage, reward in zip(group.completions, advantages_G, group.rewards_G, strict=True)
        if advantage is not None and reward is not None and completion.tokens and not (completion.truncated and masks)
    ]
    weights_G = AGGREGATIONS[settings.aggregation]([completion.length for completion, *_ in kept])
    return [row for one, weight in zip(kept, weights_G, strict=True) for row in rows_of_answer(group, *one, weight)]


def rows_of_answer(
    group: ScoredGroup, completion: Completion, advantage: float = 0.0, reward: float = 0.0, weight: float = 1.0
) -> list[TrainingRow]:
    """Return a completion as a row, or as one row for each conversation of an agent."""
    whole = Segment(group.prompt.tokens, completion.tokens, completion.logprobs, completion.written)
    return [
        TrainingRow(prompt, tokens, logprobs, advantage, reward, weight, written, group.prompt.place)
        for prompt, tokens, logprobs, written in completion.segments or [whole]
    ]


def idle_row(group: ScoredGroup) -> TrainingRow:
    """Return a row without weight, for a rank that has nothing to train on: the prompt and its last token once more,
    because agents may have left all answers empty."""
    prompt = group.prompt.tokens
    return TrainingRow(prompt, prompt[-1:], (0.0,), advantage=0.0, weight=0.0)


def minibatches(rows: Sequence[TrainingRow], idle: TrainingRow, config: Config, packer: "Packer") -> list[MiniBatch]:
    """Return the rows of this rank, split into the updates of one pass. All ranks must run the same number of
    micro-batches in an update, so a rank with fewer adds the idle row. An update has the same groups for any number of
    ranks, because the groups of all ranks are assigned to updates by their place."""
    places = sorted(distributed.dealt([*{row.place for row in rows}]))
    turn = {place: index % config.algorithm.minibatches for index, place in enumerate(places)}
    parts = [[row for row in rows if turn[row.place] == update] for update in range(config.algorithm.minibatches)]
    packed = [packer.pack(part) for part in parts]
    facts = [(len(batches), weight_of(part), tokens_in(part)) for part, batches in zip(parts, packed, strict=True)]
    updates = []
    for batches, of_all_ranks in zip(packed, zip(*distributed.gather(facts), strict=True), strict=True):
        counts, weights, tokens = zip(*of_all_ranks, strict=True)
        fillers = packer.pack([idle]) * (max(counts) - len(batches))
        divisor = config.constant_divisor if config.algorithm.aggregation == "dr_grpo" else float(sum(weights))
        updates.append(MiniBatch([*batches, *fillers], divisor, float(sum(tokens))))
    return updates


@dataclass(slots=True)
class Packer:
    """Packs rows into micro-batches of at most `token_budget` tokens (or one row), the longest rows first.

    If the model works on a line of tokens (`loss/shared_prefix.py`), answers to the same prompt stay together, and the
    prompt counts once. Inside the attention, however, each answer has the keys and values of its whole row, which add
    an eighth of a token's memory for each of its tokens. Otherwise rows of similar length stay together, and padding
    counts. `token_budget` shrinks when memory runs out (`step/update.py`).
    """

    token_budget: int
    pad_token: int
    flat: bool = True

    def pack(self, rows: Sequence[TrainingRow]) -> list[TrainingBatch]:
        return [to_tensors(part, self.pad_token) for part in self.arrange(rows)]

    def arrange(self, rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
        """Return the rows of each micro-batch."""
        batches: list[list[TrainingRow]] = []
        for row in self._ordered(rows):
            if batches and self.cost_of([*batches[-1], row]) <= self.token_budget:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def cost_of(self, rows: Sequence[TrainingRow]) -> int:
        """Return the number of tokens that a micro-batch of these rows takes from the budget. With padding, all rows
        have the length of the first."""
        if not self.flat:
            return len(rows) * rows[0].length
        shared = [False, *(one.prompt == other.prompt for one, other in pairwise(rows))]
        new = (len(row.completion) if is_shared else row.length for row, is_shared in zip(rows, shared, strict=True))
        return sum(new) + sum(row.length // 8 for row in rows)

    def _ordered(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        by_length = sorted(rows, key=lambda row: row.length, reverse=True)
        if not self.flat:
            return by_length
        longest: dict[tuple[int, ...], int] = {}
        for row in by_length:
            longest.setdefault(tuple(row.prompt), row.length)
        return sorted(by_length, key=lambda row: (longest[tuple(row.prompt)], tuple(row.prompt)), reverse=True)


def to_tensors(rows: Sequence[TrainingRow], pad_token: int) -> TrainingBatch:
    """Return rows as one micro-batch, right-padded and shifted."""
    width = max(row.length for row in rows) - 1
    tokens = [[*row.prompt, *row.completion] for row in rows]
    before = [len(row.prompt) - 1 for row in rows]
    return TrainingBatch(
        rows=rows,
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
    """Number each token by its whole prefix, so that rows with a common prefix share numbers."""
    numbers: dict[tuple[int, int], int] = {}  # (number of the token before, token) -> number
    prompts: dict[tuple[int, ...], int] = {}
    inputs: list[Sequence[int | None]] = []
    targets: list[Sequence[int | None]] = []
    for index, row in enumerate(rows):
        prompts.setdefault(tuple(row.prompt), index)
        path, before = [], -1
        for token in (*row.prompt, *row.completion):
            before = numbers.setdefault((before, token), len(numbers))
            path.append(before)
        inputs.append(path[:-1])
        answer = zip(path[len(row.prompt) :], row.mask)
        targets.append([None] * (len(row.prompt) - 1) + [number if is_own else None for number, is_own in answer])
    first_B = torch.tensor([prompts[tuple(row.prompt)] for row in rows])
    return Tree(*_in_order(inputs, width), *_in_order(targets, width), first_B)


def _in_order(rows: Sequence[Sequence[int | None]], width: int) -> tuple[Tensor, Tensor]:
    """Number the items of rows in the order in which they first occur. Return the number at each of the B x T places,
    0 where there is no item, and for each number the first of its places."""
    seen: dict[int | None, tuple[int, int]] = {}  # the number and the first place of each item
    for row, items in enumerate(rows):
        for at, item in enumerate(items):
            if item is not None:
                seen.setdefault(item, (len(seen), row * width + at))
    numbers = [[0 if item is None else seen[item][0] for item in items] for items in rows]
    return _pad(numbers, width, 0), torch.tensor([place for _, place in seen.values()])


def halves(batch: TrainingBatch) -> list[TrainingBatch]:
    """Split a batch into two, with all its measurements."""
    middle, parts = len(batch.rows) // 2, []
    assert middle, "a single row cannot be split"
    named = [(field.name, getattr(batch, field.name)) for field in fields(batch)]
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    for part in (slice(0, middle), slice(middle, None)):
        rows = batch.rows[part]
        width = max(row.length for row in rows) - 1
        cut = {name: value[part, :width] if name.endswith("_BT") else value[part] for name, value in tensors}
        parts.append(replace(batch, rows=rows, tree=tree_of(rows, width).to(batch.inputs_BT.device), **cut))
    return parts


def _pad(rows: Sequence[Sequence[float]], width: int, filler: float) -> Tensor:
    return torch.tensor([[*row, *[filler] * (width - len(row))] for row in rows])
