"""The rewards that are built in: each takes one read completion and gives a number, 1.0 at best.

To add one, write a function and name it in `COMPONENTS`; `reward.weights` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainer import answers
from trainer.config import Reward
from trainer.types import Completion, Problem


@dataclass(frozen=True, slots=True)
class Reading:
    """A completion and what was read from it: the answer in the asked-for place, and the answer found anywhere."""

    problem: Problem
    completion: Completion
    strict: str | None
    lenient: str | None
    correct_strict: bool
    correct_lenient: bool


def read(problem: Problem, completion: Completion, style: str) -> Reading:
    strict = answers.strict(completion.text, style)
    lenient = answers.lenient(completion.text)
    correct_strict = strict is not None and answers.equal(strict, problem.gold)
    correct_lenient = lenient is not None and answers.equal(lenient, problem.gold)
    return Reading(problem, completion, strict, lenient, correct_strict, correct_lenient)


def correct(reading: Reading, settings: Reward) -> float:
    return float(reading.correct_strict if settings.answer == "strict" else reading.correct_lenient)


def has_format(reading: Reading, settings: Reward) -> float:
    return float(reading.strict is not None)


def length(reading: Reading, settings: Reward) -> float:
    shortest, longest = settings.length_band
    return float(shortest <= len(reading.completion.text) <= longest)


COMPONENTS: dict[str, Callable[[Reading, Reward], float]] = {
    "correct": correct,
    "format": has_format,
    "length": length,
}
