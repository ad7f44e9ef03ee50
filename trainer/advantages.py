"""advantage: how much better an answer is than the rest of its group.

With rewards 1, 0, 0, 1 the mean is 0.5 and the standard deviation 0.5, so the advantages are 1, -1, -1, 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean, pstdev

EPSILON = 1e-6  # keeps a group whose rewards differ by rounding alone from being blown up


def normalised(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the mean of the group, over its population standard deviation (ddof 0)."""
    mean, deviation = fmean(rewards_G), pstdev(rewards_G)
    return [(reward - mean) / (deviation + EPSILON) for reward in rewards_G]


def centred(rewards_G: Sequence[float]) -> list[float]:
    """Reward minus the mean of the group (Dr. GRPO: no division, so easy and hard problems are not blown up)."""
    mean = fmean(rewards_G)
    return [reward - mean for reward in rewards_G]


ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {"grpo": normalised, "dr_grpo": centred}


def advantages_of(rewards_G: Sequence[float | None], method: str) -> list[float | None]:
    """One advantage for each reward; a completion without a reward has none and is no part of the group."""
    known = [reward for reward in rewards_G if reward is not None]
    values = iter(ADVANTAGES[method](known) if known else [])
    return [None if reward is None else next(values) for reward in rewards_G]
