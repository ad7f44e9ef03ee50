"""Compare two evaluations of the same problems: which is better, what flipped, how similar the answers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trainer.evaluation.estimates import mcnemar
from trainer.evaluation.evaluate import Evaluation, Outcome
from trainer.records import Completion

SIGNIFICANT = 0.05


@dataclass(frozen=True, slots=True)
class Flip:
    """A problem that only one of two models solves."""

    direction: str  # gained or lost
    before: Outcome
    after: Outcome

    def record(self) -> dict[str, Any]:
        asked = {"problem": self.before.problem_id, "question": self.before.question, "gold": self.before.gold}
        sides = {"before": self.before, "after": self.after}
        answers = {f"{side}_answer": outcome.score.strict for side, outcome in sides.items()}
        completions = {f"{side}_completion": outcome.completion.text for side, outcome in sides.items()}
        return {"direction": self.direction, **asked, **answers, **completions}


@dataclass(frozen=True, slots=True)
class Comparison:
    before: Evaluation
    after: Evaluation

    @property
    def names(self) -> str:
        return f"{self.before.name} -> {self.after.name}"

    @property
    def test(self) -> tuple[int, int, float]:
        """Return the problems gained, the problems lost, and p of the exact McNemar test."""
        return mcnemar(self.before.correct, self.after.correct)

    @property
    def flips(self) -> list[Flip]:
        return [
            Flip("gained" if new.score.correct_strict else "lost", old, new)
            for old, new in zip(self.before.outcomes, self.after.outcomes, strict=True)
            if old.score.correct_strict != new.score.correct_strict
        ]

    @property
    def verdict(self) -> str:
        """Return a sentence: better, worse, or within the noise of so few problems."""
        gained, lost, p = self.test
        change = f"{self.before.accuracy:.1%} -> {self.after.accuracy:.1%}"
        if p >= SIGNIFICANT:
            return f"{change} is within the noise of {len(self.before.outcomes)} problems (p = {p:.2f})."
        return f"{'better' if gained > lost else 'worse'}, {change} (p = {p:.1g}, exact McNemar test)."

    def summary(self) -> dict[str, Any]:
        gained, lost, p = self.test
        named = {"before": self.before.name, "after": self.after.name}
        return {**named, "gained": gained, "lost": lost, "p": p, "verdict": self.verdict}


def all_pairs(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compare each model with every earlier one: base and adapter, base and merged, adapter and merged."""
    return [Comparison(*pair) for pair in combinations(evaluations, 2)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How similar the answers of two models are: identical ones, and the log-probs of the tokens they share."""

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
    """Return the log-probs of the tokens before the first difference, after which the contexts differ."""
    both = list(zip(one.tokens, other.tokens, one.logprobs, other.logprobs))
    end = next((position for position, (a, b, *_) in enumerate(both) if a != b), len(both))
    return [(x, y) for _, _, x, y in both[:end]]
