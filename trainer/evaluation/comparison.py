"""Compare two evaluations of the same problems: which is better, what flipped, how similar the answers are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp, inf, log1p
from statistics import fmean
from typing import Any

from trainer.errors import MergeError
from trainer.estimates import SIGNIFICANT, mcnemar, paired_difference
from trainer.evaluation.evaluate import Evaluation, Outcome
from trainer.records import Completion
from trainer.watch.verdict import evidence_of

ALIKE = 0.99  # share of the answers of a merged model that have to be those of the adapted one
# The mean difference of a log-prob that merging may make by rounding. In bf16 it is 0.02 for SmolLM2-135M, where the
# log-prob of a single token differs by up to 0.33; so an answer may part from the other where `LARGEST` times the mean
# explains it.
ROUNDING = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.05}
LARGEST = 10


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
    def sentence(self) -> str:
        """Return whether the second model is better, worse, or within the noise of so few problems, and why."""
        gained, lost, p = self.test
        problems = len(self.before.outcomes)
        difference = paired_difference(gained, lost, problems)
        kind = "within the noise" if p >= SIGNIFICANT else "better" if gained > lost else "worse"
        return f"{kind}: {evidence_of(self.before.accuracy, self.after.accuracy, problems, difference, p)}"

    def summary(self) -> dict[str, Any]:
        gained, lost, p = self.test
        named = {"before": self.before.name, "after": self.after.name}
        in_any_form = zip(("gained", "lost", "p"), mcnemar(self.before.correct_lenient, self.after.correct_lenient))
        strict = {"gained": gained, "lost": lost, "p": p, "sentence": self.sentence}
        return {**named, **strict, "lenient": dict(in_any_form)}


def all_pairs(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compare each model with every earlier one: base and adapter, base and merged, adapter and merged."""
    return [Comparison(*pair) for pair in combinations(evaluations, 2)]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How similar the answers of two models are: identical ones, and the log-probs of the tokens they share.

    `partings` has a number for each pair of answers that are not identical: the smallest difference between the models'
    log-probs with which they can choose different tokens there.
    """

    identical: int
    problems: int
    largest_difference: float
    mean_difference: float
    partings: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"{self.identical} of {self.problems} greedy answers identical, "
            f"log-probs within {self.largest_difference:.1e} where the tokens agree"
        )

    def must_be_rounding(self, dtype: str) -> None:
        """Raise MergeError if the models differ by more than the rounding of this precision."""
        rounding = ROUNDING[dtype]
        unlike = sum(not parting <= LARGEST * rounding for parting in self.partings)
        if unlike > (1 - ALIKE) * self.problems or not self.mean_difference <= rounding:
            raise MergeError(
                f"the merged model is not the one that was trained: {unlike} of {self.problems} greedy answers differ, "
                f"and log-probs by {self.mean_difference:.1e} in the mean; rounding to {dtype} explains up to "
                f"{rounding:g}. Use the adapter without merging it, and report lora.targets and the model."
            ).of_all()


def agreement(one: Evaluation, other: Evaluation) -> Agreement:
    pairs = [(a.completion, b.completion) for a, b in zip(one.outcomes, other.outcomes, strict=True)]
    differences = [apart for a, b in pairs for apart in _differences(a, b)]
    return Agreement(
        sum(a.tokens == b.tokens for a, b in pairs),
        len(pairs),
        max(differences, default=0.0),
        fmean(differences or [0.0]),
        tuple(_parting(a, b) for a, b in pairs if a.tokens != b.tokens),
    )


def _differences(one: Completion, other: Completion) -> list[float]:
    """Return the differences of log-probs before the first different token, after which the contexts differ."""
    both = list(zip(one.logprobs, other.logprobs))
    return [abs(x - y) for x, y in both[: _shared(one, other)]]


def _parting(one: Completion, other: Completion) -> float:
    """Return the smallest difference d between the models' log-probs with which the first different tokens differ.

    Each is the likeliest token of its model, with log-probs x and y. The first model gives the other token y - d or
    more. That is at most x, because x is the likeliest, and at most what x leaves. The same holds the other way round.
    """
    at = _shared(one, other)
    both = zip(one.logprobs[at : at + 1], other.logprobs[at : at + 1])
    # inf: one answer is the beginning of the other
    return next((max(abs(x - y), y - _left(x), x - _left(y)) for x, y in both), inf)


def _left(logprob: float) -> float:
    """Return the log-prob of everything else."""
    return log1p(-exp(logprob)) if logprob < 0 else -inf


def _shared(one: Completion, other: Completion) -> int:
    """Return how many tokens at the beginning are the same."""
    pairs = enumerate(zip(one.tokens, other.tokens))
    return next((at for at, (a, b) in pairs if a != b), min(len(one.tokens), len(other.tokens)))
