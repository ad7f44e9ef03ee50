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

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class Share(NamedTuple):
    """What one group contributes: a weight for each of its answers, and its part of the divisor."""

    weights_G: list[float]
    size: float


def by_token(lengths_G: Sequence[int]) -> Share:
    return Share([1.0] * len(lengths_G), float(sum(lengths_G)))


def by_answer(lengths_G: Sequence[int]) -> Share:
    return Share([1 / length for length in lengths_G], float(len(lengths_G)))


def by_group(lengths_G: Sequence[int]) -> Share:
    return Share([1 / sum(lengths_G)] * len(lengths_G), 1.0)


AGGREGATIONS: dict[str, Callable[[Sequence[int]], Share]] = {
    "dapo": by_token,
    "grpo": by_answer,
    "bnpo": by_group,
    "dr_grpo": by_token,  # and `Config.constant_divisor` in place of the sizes
}
