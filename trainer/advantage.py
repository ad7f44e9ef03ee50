"""advantage: how much better an answer is than the rest of its group.

With rewards 1, 0, 0, 1 the mean is 0.5 and the standard deviation 0.5, so the advantages are 1, -1, -1, 1. The
deviation is that of the population (ddof 0) and has 1e-6 added, unless `algorithm.advantage_ddof` and
`algorithm.advantage_eps` say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import fmean

from trainer.config.settings import Algorithm


def deviation(values: Sequence[float], ddof: int) -> float:
    """Standard deviation; 0 where there are too few values to have one."""
    if len(values) <= ddof:
        return 0.0
    mean = fmean(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def normalised(rewards_G: Sequence[float], settings: Algorithm, step_deviation: float) -> list[float]:
    """Reward minus the mean of the group, over the standard deviation of the group."""
    spread = deviation(rewards_G, settings.advantage_ddof) + settings.advantage_eps
    return [value / spread for value in centred(rewards_G)]


def centred(rewards_G: Sequence[float], *_: object) -> list[float]:
    """Reward minus the mean of the group (Dr. GRPO: no division, so easy and hard problems are not blown up)."""
    mean = fmean(rewards_G)
    return [reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: Sequence[float], *_: object) -> list[float]:
    """Reward minus the mean of the others (RLOO): the centred one, times G / (G - 1)."""
    others = len(rewards_G) - 1
    return [value * (others + 1) / others if others else 0.0 for value in centred(rewards_G)]


def over_step_deviation(rewards_G: Sequence[float], settings: Algorithm, step_deviation: float) -> list[float]:
    """Reward minus the mean of the group, over the standard deviation of all rewards of the step."""
    return [value / (step_deviation + settings.advantage_eps) for value in centred(rewards_G)]


ADVANTAGES: dict[str, Callable[[Sequence[float], Algorithm, float], list[float]]] = {
    "grpo": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "batch_std": over_step_deviation,
}


def advantages_of(
    rewards_G: Sequence[float | None], settings: Algorithm, step_deviation: float = 0.0
) -> list[float | None]:
    """One advantage for each reward; a completion without a reward has none and is no part of the group."""
    known = scored(rewards_G)
    values = iter(ADVANTAGES[settings.advantage](known, settings, step_deviation) if known else [])
    return [None if reward is None else next(values) for reward in rewards_G]


def scored(rewards: Iterable[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]
