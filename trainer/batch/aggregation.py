"""batch: how the tokens of a step become one number.

The loss is a sum over tokens of weight x loss, divided once, by a number that belongs to the whole step: it is the same
however the answers are dealt out over micro-batches and ranks.

    dapo      mean over all tokens                         weight 1                    divisor: tokens
    grpo      mean over answers of their means             weight 1 / own length       divisor: answers
    bnpo      mean over groups of their token means        weight 1 / tokens of group  divisor: groups
    dr_grpo   sum over tokens, by a constant               weight 1                    divisor: the longest it could be

`bnpo` is the mean over a local batch. What is local must not depend on the machine, so here it is the group of one
problem, which never crosses a rank.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.records import TrainingRow


class Aggregation(NamedTuple):
    """The weights of the answers of a group, by their lengths, and what rows of any groups add to the divisor."""

    weights_G: Callable[[Sequence[int]], list[float]]
    size: Callable[[Sequence[TrainingRow]], int]


def tokens_in(rows: Sequence[TrainingRow]) -> int:
    return sum(sum(row.mask) for row in rows)


AGGREGATIONS = {
    "dapo": Aggregation(lambda lengths_G: [1.0 for _ in lengths_G], tokens_in),
    "grpo": Aggregation(lambda lengths_G: [1 / length for length in lengths_G], len),
    "bnpo": Aggregation(
        lambda lengths_G: [1 / sum(lengths_G) for _ in lengths_G], lambda rows: len({row.place for row in rows})
    ),
    "dr_grpo": Aggregation(lambda lengths_G: [1.0 for _ in lengths_G], tokens_in),  # `Config.constant_divisor` instead
}
