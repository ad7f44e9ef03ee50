"""Compare two evaluations of the same problems: which is better, and what flipped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from trainer.estimates import SIGNIFICANT, mcnemar, paired_difference
from trainer.evaluation.evaluate import Evaluation, Outcome
from trainer.watch.verdict import evidence_of


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
