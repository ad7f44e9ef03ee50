"""How good a model is: greedy answers to held-out problems, counted, with an interval, compared problem by problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import NormalDist, fmean
from typing import Any

from trainer import distributed
from trainer.rewards.scorer import Scorer
from trainer.rollouts import Sampler, collect
from trainer.types import Completion, Prompt, Sampling, Score

CATEGORIES = ("correct", "wrong answer", "no answer")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One problem, answered and scored."""

    problem_id: str
    question: str
    gold: str
    completion: Completion
    score: Score

    @property
    def category(self) -> str:
        if self.score.correct_strict:
            return "correct"
        return "wrong answer" if self.score.strict is not None else "no answer"


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All problems, answered by one model. `strict` wants the format that was asked for; `lenient` any answer."""

    name: str
    outcomes: tuple[Outcome, ...]

    @property
    def correct(self) -> list[bool]:
        return [outcome.score.correct_strict for outcome in self.outcomes]

    @property
    def accuracy(self) -> float:
        return fmean(self.correct)

    @property
    def lenient_accuracy(self) -> float:
        return fmean(outcome.score.correct_lenient for outcome in self.outcomes)

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(sum(self.correct), len(self.outcomes))

    def share(self, condition: Callable[[Outcome], bool]) -> float:
        return fmean(condition(outcome) for outcome in self.outcomes)

    def summary(self) -> dict[str, Any]:
        """What is printed and stored; `records` has the single problems."""
        return {
            "name": self.name,
            "problems": len(self.outcomes),
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "lenient_accuracy": self.lenient_accuracy,
            "categories": {name: sum(outcome.category == name for outcome in self.outcomes) for name in CATEGORIES},
            "truncated": self.share(lambda outcome: outcome.completion.truncated),
            "mean_tokens": fmean(len(outcome.completion.tokens) for outcome in self.outcomes),
        }

    def records(self) -> list[dict[str, Any]]:
        return [
            {
                "model": self.name,
                "problem": outcome.problem_id,
                "question": outcome.question,
                "gold": outcome.gold,
                "completion": outcome.completion.text,
                "category": outcome.category,
                "strict": outcome.score.strict,
                "lenient": outcome.score.lenient,
                "correct_lenient": outcome.score.correct_lenient,
                "truncated": outcome.completion.truncated,
            }
            for outcome in self.outcomes
        ]


def evaluate(name: str, sampler: Sampler, scorer: Scorer, prompts: Sequence[Prompt], max_new_tokens: int) -> Evaluation:
    """Greedy answers; the problems are split over the ranks, and every rank gets the whole result."""
    sampling = Sampling(group=1, temperature=0.0, max_new_tokens=max_new_tokens, seed=0)
    groups = collect(sampler, scorer, distributed.mine(prompts), sampling)
    parts = distributed.gather(
        [
            Outcome(problem.id, problem.question, problem.gold, group.completions[0], group.scores[0])
            for group in groups
            for problem in (group.prompt.problem,)
        ]
    )
    by_rank = [iter(part) for part in parts]
    return Evaluation(name, tuple(next(by_rank[index % len(by_rank)]) for index in range(len(prompts))))


def wilson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """The Wilson interval of a share: honest for small samples and near 0 and 1, where the usual one is not."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def mcnemar(before: Sequence[bool], after: Sequence[bool]) -> tuple[int, int, float]:
    """Problems gained, problems lost, and the exact chance of so uneven a split if neither model is better."""
    gained = sum(new and not old for old, new in zip(before, after, strict=True))
    lost = sum(old and not new for old, new in zip(before, after, strict=True))
    flipped = gained + lost
    tail = sum(comb(flipped, k) for k in range(min(gained, lost) + 1))
    return gained, lost, min(1.0, 2 * tail / 2**flipped)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How alike two models answer: the same tokens, and how far the log-probs of these tokens are apart."""

    identical: int
    problems: int
    largest_difference: float

    def __str__(self) -> str:
        return (
            f"{self.identical} of {self.problems} greedy answers identical, "
            f"log-probs within {self.largest_difference:.1e} where the tokens agree"
        )


def agreement(one: Evaluation, other: Evaluation) -> Agreement:
    pairs = [(a.completion, b.completion) for a, b in zip(one.outcomes, other.outcomes, strict=True)]
    differences = [abs(x - y) for a, b in pairs for x, y in _common_logprobs(a, b)]
    return Agreement(sum(a.tokens == b.tokens for a, b in pairs), len(pairs), max(differences, default=0.0))


def _common_logprobs(one: Completion, other: Completion) -> list[tuple[float, float]]:
    """Log-probs of the tokens up to the first that differs: behind it the two are answers to different texts."""
    both = list(zip(one.tokens, other.tokens, one.logprobs, other.logprobs))
    end = next((position for position, (a, b, *_) in enumerate(both) if a != b), len(both))
    return [(x, y) for _, _, x, y in both[:end]]


def verdict(before: Evaluation, after: Evaluation) -> str:
    """Better, worse, or not told apart by so few problems."""
    gained, lost, p = mcnemar(before.correct, after.correct)
    change = f"{before.accuracy:.1%} -> {after.accuracy:.1%}"
    if p >= 0.05:
        return f"verdict: {change} is within the noise of {len(before.outcomes)} problems (p = {p:.2f})."
    return f"verdict: {'better' if gained > lost else 'worse'}, {change} (p = {p:.1g}, exact McNemar test)."
