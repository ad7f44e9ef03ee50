"""GSM8K: 7,473 training and 1,319 test word problems at grade-school level, with worked solutions."""

from __future__ import annotations

import re
from typing import ClassVar

from trainer.answers import number
from trainer.errors import DataError
from trainer.problem.dataset import DataTask
from trainer.problem.sources import HubSet, Record
from trainer.records import Problem

TRAINING_PROBLEMS = 7473
_CALCULATOR = re.compile(r"<<[^>]*>>")


class Gsm8kTask(DataTask):
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
