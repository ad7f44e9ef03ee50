"""batch: how the losses of all tokens of a step are aggregated into one.

The loss is the sum over tokens of weight x loss, divided once by a number that belongs to the whole step, and does not
depend on how the answers are split into micro-batches and over ranks.

    dapo      mean over all tokens                         weight 1                    divisor: tokens
    grpo      mean over answers of their token means       weight 1 / own length       divisor: answers
    bnpo      mean over groups of their token means        weight 1 / tokens of group  divisor: groups
    dr_grpo   sum over tokens, divided by a constant       weight 1                    divisor: maximum number of tokens

Each divisor but the last is the sum of the weights of all tokens.

`bnpo` is the mean over a local batch. The local batch must not depend on the machine, so here it is the group of one
problem, which is never split over ranks.
"""

from collections.abc import Callable, Sequence

from trainer.records import TrainingRow

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
