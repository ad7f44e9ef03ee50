r"""MATH: competition problems, answered in the last \boxed{} of the solution. Held out are the 500 of MATH-500."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, ClassVar

from trainer.answers import find
from trainer.errors import DataError
from trainer.problem.dataset import DataTask
from trainer.problem.sources import HubSet, Record
from trainer.records import Problem


class MathTask(DataTask):
    name = "math"
    prompt_style = "boxed"
    answer_style = "boxed"
    symbolic = True  # x(x+1) and x^2+x are one answer: asks the scorer for symbolic equality
    published: ClassVar = {
        "train": HubSet("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
        "test": HubSet("HuggingFaceH4/MATH-500", None, "test"),
    }

    def problem(self, name: str, record: Record) -> Problem:
        column = self.settings.question or "problem"
        question = record.text(column, "task.question")
        solution = str(record.values.get(self.settings.solution or "solution") or "").strip()
        return Problem(name, question, self._gold(record), solution, record.others(column) | _level(record))

    def _gold(self, record: Record) -> str:
        """Return the `answer` column if there is one, else the content of the last box in the solution."""
        boxed, has_answer = partial(find.marked, style="boxed"), record.values.get("answer") not in (None, "")
        if given := self.settings.answer or ("answer" if has_answer else None):
            text = record.answer(given, "task.answer")
            if "\\boxed" in text and boxed(text) is None:
                raise DataError(record.where, f"`{given}` is {text[-40:]!r}; expected a closed \\boxed{{...}}")
            return boxed(text) or text
        column = self.settings.solution or "solution"
        gold = boxed(record.text(column, "task.solution"))
        if gold is None:
            raise DataError(record.where, f"`{column}` has no answer in it; expected \\boxed{{...}}")
        return gold


def _level(record: Record) -> dict[str, Any]:
    """Return the subject, and `Level 5` as the number 5, which a curriculum by difficulty needs."""
    digits = re.search(r"\d+", str(record.values.get("level")))
    subject = record.values.get("subject") or record.values.get("type")
    return ({"level": int(digits[0])} if digits else {"level": None}) | ({"subject": subject} if subject else {})
