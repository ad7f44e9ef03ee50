"""The numbers of a step. Everything is a sum and a weight until the end, so ranks add up exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from math import sqrt
from statistics import fmean

from trainer.answers.strip_thinking import after_thinking
from trainer.records import Completion, ScoredGroup, Update

Sums = dict[str, tuple[float, float]]  # name -> (sum, weight)
LARGEST = "/max"
EXTREMES = {"/min": min, LARGEST: max}  # of names that end so


class Tally:
    """Holds weighted sums by name; `means` turns them into metrics."""

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, name: str, amount: float, weight: float = 1.0) -> None:
        """Add a sum over `weight` things."""
        before, weighed = self.sums.get(name, (0.0, 0.0))
        if extreme := EXTREMES.get(name[-4:]):
            self.sums[name] = (extreme(before if weighed else float(amount), float(amount)), 1.0)
        else:
            self.sums[name] = (before + float(amount), weighed + float(weight))

    def add_all(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self.add(name, value)

    def merge(self, sums: Sums) -> None:
        for name, (amount, weight) in sums.items():
            self.add(name, amount, weight)

    def means(self, gather: Callable[[Sums], list[Sums]]) -> dict[str, float]:
        """Return the mean of each name over all ranks; `gather` brings the sums of every rank."""
        together = Tally()
        for sums in gather(self.sums):
            together.merge(sums)
        means = {name: amount / weight for name, (amount, weight) in together.sums.items() if weight}
        return _with_correlation(_with_deviations(means))


def _with_deviations(means: dict[str, float]) -> dict[str, float]:
    """Replace the mean square `x/square` by the standard deviation `x/std`."""
    squares = {name.removesuffix("/square"): value for name, value in means.items() if name.endswith("/square")}
    rest = {name: value for name, value in means.items() if not name.endswith("/square")}
    return rest | {
        f"{name}/std": sqrt(max(0.0, square - means[f"{name}/mean"] ** 2)) for name, square in squares.items()
    }


def _with_correlation(means: dict[str, float]) -> dict[str, float]:
    """Replace the products of `_tally_length` by the correlation of reward and length among answers that are equally
    right, and by the share of the differences in reward that are among them."""
    products = {name: means[name] for name in PRODUCTS if name in means}
    rest = {name: value for name, value in means.items() if name not in products}
    if not all(products.get(name) for name in PRODUCTS[1:]):
        return rest
    both, lengths, rewards, all_rewards = products.values()
    return rest | {
        "reward_length/correlation": both / sqrt(lengths * rewards),
        "reward_length/share": rewards / all_rewards,
    }


PRODUCTS = ("reward_length/both", "reward_length/lengths", "reward_length/rewards", "reward_length/all_rewards")
NGRAM, SHORTEST_LOOP = 4, 48  # tokens


def tally_groups(tally: Tally, groups: Iterable[ScoredGroup]) -> None:
    """Count what the sampled answers show: reward and its parts, accuracy, length."""
    for group in groups:
        right = [score.correct_lenient for score in group.scores]
        tally.add("dead_groups", group.is_dead)
        tally.add("dead_groups/wrong", group.is_dead and not any(right))
        tally.add("dead_groups/right", group.is_dead and all(right))
        tally.add("distinct", len({one.turns or one.text for one in group.completions}), len(group.completions))
        _tally_length(tally, group)
        for completion, score in zip(group.completions, group.scores, strict=True):
            tally.add("length", completion.length)
            if completion.turns:
                tally.add("turns", sum(turn.role == "model" for turn in completion.turns))
                tally.add("observed", len(completion.tokens) - completion.length)
            tally.add("truncated", completion.truncated)
            tally.add("unfinished_thinking", completion.truncated and _is_thinking(group, completion))
            tally.add("empty", not completion.text.strip())
            tally.add("repetitive", is_repetitive(completion))
            tally.add("accuracy/strict", score.correct_strict)
            tally.add("accuracy/lenient", score.correct_lenient)
            if score.reward is not None:
                for name in ("mean", "min", "max"):
                    tally.add(f"reward/{name}", score.reward)
                tally.add("reward/square", score.reward**2)
            for name, value in score.components.items():
                tally.add_all(f"reward/{name}", [] if value is None else [value])
        if part := group.prompt.problem.part:
            tally.add_all(f"part/accuracy/{part}", [score.correct_strict for score in group.scores])
            tally.add_all(f"part/reward/{part}", [one for one in group.rewards_G if one is not None])


def _tally_length(tally: Tally, group: ScoredGroup) -> None:
    """Add products of reward and length, centred among the equally right answers of a group."""
    pairs = [
        (score.correct_lenient, float(completion.length), score.reward)
        for completion, score in zip(group.completions, group.scores, strict=True)
        if score.reward is not None
    ]
    for is_right in (False, True):
        equals = [(length, reward) for right, length, reward in pairs if right == is_right]
        if equals:
            length, reward = (fmean(values) for values in zip(*equals, strict=True))
            moved = [(one - length, other - reward) for one, other in equals]
            sums = (sum(x * y for x, y in moved), sum(x * x for x, _ in moved), sum(y * y for _, y in moved))
            for name, value in zip(PRODUCTS, sums):
                tally.add(name, value, len(equals))
    if pairs:
        mean = fmean(reward for *_, reward in pairs)
        tally.add(PRODUCTS[-1], sum((reward - mean) ** 2 for *_, reward in pairs), len(pairs))


def _is_thinking(group: ScoredGroup, completion: Completion) -> bool:
    _, _, is_open = after_thinking(group.prompt.text + completion.text)
    return is_open


def is_repetitive(completion: Completion) -> bool:
    """Return True for a long answer most of whose runs of four tokens have come before."""
    tokens = list(compress(completion.tokens, completion.mask))
    if len(tokens) < SHORTEST_LOOP:
        return False
    runs = [tokens[start : start + NGRAM] for start in range(len(tokens) - NGRAM + 1)]
    return len(set(map(tuple, runs))) < 0.3 * len(runs)


def metrics_of_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Return means over the updates of a step that were not skipped, and the last learning rate."""
    done = [update for update in updates if not update.skipped]
    metrics = {"lr": updates[-1].lr, "skipped": float(len(updates) - len(done))} if updates else {}
    if done:
        metrics["grad_norm"] = fmean(update.grad_norm for update in done)
        named = set.intersection(*(set(update.measured) for update in done))
        metrics |= {name: fmean(update.measured[name] for update in done) for name in sorted(named)}
    return metrics
