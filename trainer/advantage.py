"""advantage: how much better an answer is than the rest of its group.

With rewards 1, 0, 0, 1 the mean is 0.5 and the standard deviation 0.5, so the advantages are 1, -1, -1, 1. The
deviation is that of the population (ddof 0) and has 1e-6 added, unless `algorithm.advantage_ddof` and
`algorithm.advantage_eps` say otherwise.
"""

from collections.abc import Callable, Iterable, Sequence
from math import sqrt
from statistics import fmean

from trainer.config.settings import Algorithm, Config
from trainer.records import ScoredGroup

Gather = Callable[[list[float]], list[list[float]]]  # returns the lists of all ranks on every rank


def deviation(values: Sequence[float], ddof: int) -> float:
    """Return the standard deviation; 0 for too few values."""
    if len(values) <= ddof:
        return 0.0
    mean = fmean(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def normalised(rewards_G: Sequence[float], settings: Algorithm, _: float) -> list[float]:
    """Return reward minus the mean of the group, over the standard deviation of the group."""
    spread = deviation(rewards_G, settings.advantage_ddof) + settings.advantage_eps
    return [value / spread for value in centred(rewards_G)]


def centred(rewards_G: Sequence[float], *_: object) -> list[float]:
    """Return reward minus the mean of the group (Dr. GRPO: a division would inflate easy and hard problems)."""
    mean = fmean(rewards_G)
    return [reward - mean for reward in rewards_G]


def leave_one_out(rewards_G: Sequence[float], *_: object) -> list[float]:
    """Return reward minus the mean of the others (RLOO), which is the centred reward times G / (G - 1)."""
    others = len(rewards_G) - 1
    return [value * (others + 1) / others if others else 0.0 for value in centred(rewards_G)]


def over_step_deviation(rewards_G: Sequence[float], settings: Algorithm, spread: float) -> list[float]:
    """Return reward minus the mean of the group, over the standard deviation of all rewards of the step."""
    return [value / (spread + settings.advantage_eps) for value in centred(rewards_G)]


ADVANTAGES: dict[str, Callable[[Sequence[float], Algorithm, float], list[float]]] = {
    "grpo": normalised,
    "dr_grpo": centred,
    "rloo": leave_one_out,
    "batch_std": over_step_deviation,
}


def live_groups(groups: Sequence[ScoredGroup], drops_dead: bool) -> list[ScoredGroup]:
    """Return the groups to train on; dead ones are dropped if `drops_dead`."""
    return [group for group in groups if not (drops_dead and group.is_dead)]


def step_deviation(groups: Iterable[ScoredGroup], config: Config, gather: Gather) -> float:
    """Return the standard deviation of all rewards of the step, on all ranks, if the advantage is divided by it."""
    if config.algorithm.advantage != "batch_std":
        return 0.0
    rewards = gather([reward for group in groups for reward in scored(divided(group, config))])
    return deviation([reward for of_rank in rewards for reward in of_rank], config.algorithm.advantage_ddof)


def divided(group: ScoredGroup, config: Config) -> Sequence[float | None]:
    """Return the rewards to divide by a deviation, from which `reward.gate` excludes shaping."""
    return without_shaping(group) if config.gates_shaping else group.rewards_G


def without_shaping(group: ScoredGroup) -> list[float | None]:
    return [None if score.reward is None else score.reward - score.shaping for score in group.scores]


def of_group(group: ScoredGroup, config: Config, spread: float = 0.0) -> list[float | None]:
    """Return one advantage per completion. With `reward.gate`, the centred shaping is added as a multiple of the reward
    for a right answer, so that its weight means the same in every group. Shaping with a larger deviation is divided by
    that instead."""
    advantages_G = of(divided(group, config), config.algorithm, spread)
    if not config.gates_shaping:
        return advantages_G
    known = [score.shaping for score in group.scores if score.reward is not None]
    unit = max(config.pay_of_right, deviation(known, 0))
    shaping = iter(centred(known) if known else [])
    return [None if value is None else value + next(shaping) / unit for value in advantages_G]


def decided_by_shaping(
    groups: Sequence[ScoredGroup], advantages: Sequence[Sequence[float | None]], config: Config, spread: float
) -> tuple[float, float]:
    """Return the sums of absolute values of the changes that shaping makes to the advantages, and of the advantages."""
    plain = [of(without_shaping(group), config.algorithm, spread) for group in groups]
    pairs = [pair for per_group in map(zip, advantages, plain) for pair in per_group]
    known = [(value, without) for value, without in pairs if value is not None and without is not None]
    return sum(abs(value - without) for value, without in known), sum(abs(value) for value, _ in known)


def of(rewards_G: Sequence[float | None], settings: Algorithm, spread: float = 0.0) -> list[float | None]:
    """Return one advantage per reward; `spread` is the `step_deviation`. A missing reward does not count."""
    known = scored(rewards_G)
    values = iter(ADVANTAGES[settings.advantage](known, settings, spread) if known else [])
    return [None if reward is None else next(values) for reward in rewards_G]


def scored(rewards: Iterable[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]
