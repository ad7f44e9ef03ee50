"""Multiple choice, as in GPQA: one right and some wrong choices, in an order that never changes for a problem."""

from __future__ import annotations

import random
from string import ascii_uppercase
from typing import ClassVar

from trainer.errors import DataError
from trainer.problem.dataset import DataTask
from trainer.problem.sources import HubSet, Record
from trainer.records import Problem

LETTERS = ascii_uppercase[:10]  # as many as trainer/answers/ recognises
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")  # as GPQA calls them


class MultipleChoiceTask(DataTask):
    """Multiple choice; by default GPQA's main set to train on, and its diamond set held out."""

    name = "multiple_choice"
    prompt_style = "letter"
    answer_style = "letter"
    published: ClassVar = {
        "train": HubSet("Idavidrein/gpqa", "gpqa_main", "train"),
        "test": HubSet("Idavidrein/gpqa", "gpqa_diamond", "train"),
    }

    def problem(self, name: str, record: Record) -> Problem:
        settings = self.settings
        column = settings.question or "Question"
        question = record.text(column, "task.question")
        right = record.answer(settings.answer or "Correct Answer", "task.answer")
        choices = [right, *self._wrong(record)]
        if len(set(choices)) < len(choices):
            raise DataError(record.where, "two choices are the same; expected different ones")
        choices = shuffled(question, choices)
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices))
        solution = str(record.values.get(settings.solution or "Explanation") or "").strip()
        extra = record.others(column) | {"choices": choices}
        return Problem(name, f"{question}\n\n{listed}", LETTERS[choices.index(right)], solution, extra, stem=question)

    def _wrong(self, record: Record) -> list[str]:
        wrong: list[str] = []
        for column in self.settings.incorrect or INCORRECT:
            value = record.values.get(column)
            several = [Record(record.where, {column: one}) for one in value] if isinstance(value, list) else [record]
            wrong += [one.answer(column, "task.incorrect") for one in several]
        if not 1 <= len(wrong) < len(LETTERS):
            raise DataError(record.where, f"{len(wrong)} wrong choices; expected 1 to {len(LETTERS) - 1}")
        return wrong


def shuffled(question: str, choices: list[str]) -> list[str]:
    """Shuffle the choices in an order that depends on the problem alone, so it is the same in every run."""
    in_order = sorted(choices)
    random.Random("\n".join([question, *in_order])).shuffle(in_order)
    return in_order
