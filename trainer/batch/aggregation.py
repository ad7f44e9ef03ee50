"""batch: how the losses of all tokens of a step are aggregated into one.

The loss is the sum over tokens of weight x loss, divided once by a number that belongs to the whole step, and does not
depend on how the answers are split into micro-batches and over ranks.

    dapo      mean over all tokens                         weight 1                    divisor: tokens
    grpo      mean over answers of their token means       weight 1 / own length       divisor: answers
    bnpo      mean over groups of their token means        weight 1 / tokens of group  divisor: groups
    dr_grpo   sum over tokens, divided by a constant       weight 1                    divisor: maximum number of tokens

`bnpo` is the mean over a local batch. The local batch must not depend on the machine, so here it is the group of one
problem, which is never split over ranks.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.records import TrainingRow


class Aggregation(NamedTuple):
    """Computes the weights of the answers of a group from their lengths, and the share of some rows in the divisor."""

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
