"""The published data sets: GSM8K, MATH, and GPQA, which is multiple choice. A file of yours may take their place."""

import random
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from trainer.answers import find, number
from trainer.answers.choice import LETTERS
from trainer.errors import DataError
from trainer.problem.sources import HubSet, Record, Source
from trainer.problem.task import DataTask
from trainer.records import Problem

GSM8K_TRAINING_PROBLEMS = 7473
_CALCULATOR = re.compile(r"<<[^>]*>>")
INCORRECT = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")  # columns of GPQA


class Gsm8kTask(DataTask):
    """Word problems at grade-school level, with worked solutions: 7,473 to train on, 1,319 held out."""

    name = "gsm8k"
    published: ClassVar = {split: HubSet("openai/gsm8k", "main", split) for split in ("train", "test")}

    def problem(self, name: str, record: Record) -> Problem:
        columns = self.settings.question or "question", self.settings.answer or "answer"
        question = record.text(columns[0], "task.question")
        solution, marker, gold = record.text(columns[1], "task.answer").rpartition("####")
        gold = gold.strip()
        if not marker or number.number(gold) is None:
            ending = (gold or solution)[-40:]
            raise DataError(record.where, f"`{columns[1]}` ends in {ending!r}; expected a number after ####")
        worked = f"{_CALCULATOR.sub('', solution).strip()}\n#### {gold}"
        return Problem(name, question, gold, worked, record.others(columns[0]))


class MathTask(DataTask):
    r"""Competition problems; the last \boxed{} of a solution is the answer. MATH-500 is held out."""

    name = "math"
    prompt_style = answer_style = "boxed"
    symbolic = True
    published: ClassVar = {
        "train": HubSet("DigitalLearningGmbH/MATH-lighteval", "default", "train"),
        "test": HubSet("HuggingFaceH4/MATH-500", None, "test"),
    }

    def problem(self, name: str, record: Record) -> Problem:
        column = self.settings.question or "problem"
        question = record.text(column, "task.question")
        solution = str(record.values.get(self.settings.solution or "solution") or "").strip()
        level = re.search(r"\d+", str(record.values.get("level")))  # 5 for "Level 5": a curriculum needs a number
        extra = record.others(column) | {"level": int(level[0]) if level else None}
        if subject := record.values.get("subject") or record.values.get("type"):
            extra["subject"] = subject
        return Problem(name, question, self._gold(record), solution, extra)

    def _gold(self, record: Record) -> str:
        """Return the `answer` column if there is one, else the content of the last box in the solution."""
        settings = self.settings
        has_answer = settings.answer or record.values.get("answer") not in (None, "")
        column = (settings.answer or "answer") if has_answer else (settings.solution or "solution")
        text = record.answer(column, "task.answer") if has_answer else record.text(column, "task.solution")
        gold = find.marked(text, "boxed")
        if gold is None and ("\\boxed" in text or not has_answer):
            raise DataError(record.where, f"`{column}` ends in {text[-40:]!r}; expected an answer in \\boxed{{...}}")
        return gold or text


class MultipleChoiceTask(DataTask):
    """One right choice and some wrong ones; by default GPQA's main set to train on, with its diamond set held out."""

    name = "multiple_choice"
    prompt_style = answer_style = "letter"
    published: ClassVar = {
        "train": HubSet("Idavidrein/gpqa", "gpqa_main", "train"),
        "test": HubSet("Idavidrein/gpqa", "gpqa_diamond", "train"),
    }

    def problem(self, name: str, record: Record) -> Problem:
        settings = self.settings
        column = settings.question or ("question" if settings.choices else "Question")
        question = record.text(column, "task.question")
        right, choices = self._listed(record, settings.choices) if settings.choices else self._right_and_wrong(record)
        if len(set(choices)) < len(choices):
            raise DataError(record.where, "two choices are the same; expected different ones")
        choices = shuffled(question, choices)
        listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices))
        solution = str(record.values.get(settings.solution or "Explanation") or "").strip()
        extra = record.others(column) | {"choices": choices}
        return Problem(name, f"{question}\n\n{listed}", LETTERS[choices.index(right)], solution, extra, stem=question)

    def _read_all(self, split: str, source: Source) -> list[Problem]:
        self.kinds = {"text", "index", "letter"}  # of the answers, as far as all of them can be read that way
        if column := self.settings.choices:
            for record in source.records():
                with suppress(DataError):  # raised below
                    self.kinds &= self.kinds if record.flaw else self._named(record, column)[0].keys()
        return super()._read_all(split, source)

    def _listed(self, record: Record, column: str) -> tuple[str, list[str]]:
        """Return the right choice and all of them."""
        named, choices = self._named(record, column)
        if len(rights := {named[kind] for kind in named.keys() & self.kinds or named}) > 1:
            answer = self.settings.answer or "answer"
            reason = f"`{answer}` is {record.values[answer]!r}, the text of one choice and the place of another"
            raise DataError(record.where, f"{reason}; no other answer tells which", "Write the right index as a number")
        return rights.pop(), choices

    def _named(self, record: Record, column: str) -> tuple[dict[str, str], list[str]]:
        """Return the right choice for each kind of answer that it may be, and all choices, from a list as in MMLU, or
        from one with labels as in ARC."""
        record.must_have({column: "task.choices"})
        listed = record.values[column]
        texts, labels = (listed.get("text"), listed.get("label")) if isinstance(listed, Mapping) else (listed, None)
        if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS):
            raise DataError(record.where, f"`{column}` is {str(listed)[:40]}; expected a list of 2 to {len(LETTERS)}")
        choices = [Record(record.where, {column: one}).answer(column, "task.choices") for one in texts]
        answer = self.settings.answer or "answer"
        text, value = record.answer(answer, "task.answer"), record.values[answer]
        by_text, by_index = {choice: choice for choice in choices}, dict(zip(map(str, range(len(choices))), choices))
        kinds = {"text": by_text, "index": by_index, "letter": dict(zip(LETTERS, choices))}
        by_label = dict(zip(map(str, labels), choices)) if isinstance(labels, list) else {}  # which may be numbers
        if len(by_label) == len(choices):  # and not marks of right and wrong
            kinds = {"label": by_text | by_label}
        elif not isinstance(value, str):
            text, kinds = str(int(value)) if value == int(value) else text, {"index": by_index}  # 1.0 in pandas
        if not (named := {kind: by[text] for kind, by in kinds.items() if text in by}):
            raise DataError(record.where, f"`{answer}` is {value!r:.40}; expected an index from 0, a letter or a text")
        return named, choices

    def _right_and_wrong(self, record: Record) -> tuple[str, list[str]]:
        right = record.answer(self.settings.answer or "Correct Answer", "task.answer")
        wrong: list[str] = []
        for column in self.settings.incorrect or INCORRECT:
            value = record.values.get(column)
            holders = [Record(record.where, {column: one}) for one in value] if isinstance(value, list) else [record]
            wrong += [holder.answer(column, "task.incorrect") for holder in holders]
        if not 1 <= len(wrong) < len(LETTERS):
            raise DataError(record.where, f"{len(wrong)} wrong choices; expected 1 to {len(LETTERS) - 1}")
        return right, [right, *wrong]


def shuffled(question: str, choices: list[str]) -> list[str]:
    """Return the choices in an order that depends on the problem alone, so it is the same in every run."""
    in_order = sorted(choices)
    random.Random("\n".join([question, *in_order])).shuffle(in_order)
    return in_order
