"""Sums of two numbers of two digits, for a small pretrained model: it half knows them, and can learn the rest.

One sum in ten is held out. A checksum of the question decides which.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.settings import TaskSettings
from trainer.problem.word_problems import is_test
from trainer.records import Problem


@dataclass(frozen=True, slots=True)
class AdditionTask:
    settings: TaskSettings
    name: str = "addition"
    prompt_style: str = "chat"
    answer_style: str = "alone"

    def train(self) -> list[Problem]:
        return [problem for problem in _problems() if not is_test(problem.question)]

    def test(self) -> list[Problem]:
        return [problem for problem in _problems() if is_test(problem.question)]


def _problems() -> list[Problem]:
    return [
        Problem(f"addition/{a}+{b}", f"What is {a} + {b}? Reply with the number only.", str(a + b), str(a + b))
        for a in range(10, 100)
        for b in range(10, 100)
    ]
