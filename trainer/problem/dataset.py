"""Tasks that read their problems: every record is checked, and training never sees a held-out question."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.problem.sources import ENDINGS, HubSet, MissingColumn, Record, Source, locate
from trainer.problem.task import Task, asked, normalised
from trainer.records import Problem


class DataTask(Task):
    """A task on a data set. A subclass turns a record into a problem and names where the data set is published."""

    prompt_style = "gsm8k"
    answer_style = "gsm8k"
    published: ClassVar[Mapping[str, HubSet]] = {}

    def __init__(self, settings: TaskSettings) -> None:
        self.settings = settings
        self.sources = {split: locate(settings, split, self.published) for split in ("train", "test")}
        self.skipped: list[str] = []  # the reason for each record that was left out
        self.overlap = 0  # number of training problems that are in the test set, too
        self._read: dict[str, list[Problem]] = {}

    @abstractmethod
    def problem(self, name: str, record: Record) -> Problem:
        """Return the problem in a record. Raise DataError if the record cannot be used."""

    def train(self) -> list[Problem]:
        problems = self._problems("train") if self.sources["test"] else self._halves[0]
        held_out = {asked(problem) for problem in self.held_out()}
        kept = [problem for problem in problems if asked(problem) not in held_out]
        self.overlap = len(problems) - len(kept)
        return kept

    def test(self) -> list[Problem]:
        return self.held_out()

    def held_out(self) -> list[Problem]:
        """Return the held-out problems as they were read; a subclass may ask others."""
        return self._problems("test") if self.sources["test"] else self._halves[1]

    def notes(self) -> list[str]:
        notes = []
        if self.overlap:
            notes.append(f"training problems left out because the test set asks them too: {self.overlap}")
        if self.skipped:
            notes.append(f"bad records left out: {len(self.skipped)}; the first: {self.skipped[0]}")
        return notes

    def hub_sets(self) -> list[HubSet]:
        return [source for source in self.sources.values() if isinstance(source, HubSet)]

    @cached_property
    def _halves(self) -> tuple[list[Problem], list[Problem]]:
        """Split one set into training and test problems, always the same ones whatever the seed of the run."""
        problems = self._problems("train")
        count = max(1, round(len(problems) * self.settings.holdout))
        chosen = set(random.Random(0).sample(range(len(problems)), count))
        halves: tuple[list[Problem], list[Problem]] = ([], [])
        for index, problem in enumerate(problems):
            is_held_out = index in chosen
            own = replace(problem, id=problem.id.replace("/train/", "/held-out/")) if is_held_out else problem
            halves[is_held_out].append(own)
        return halves

    def _problems(self, split: str) -> list[Problem]:
        if split not in self._read:
            source = self.sources[split]
            if source is None:
                raise DataError(f"task.data_dir={self.settings.data_dir}", f"no {split} file in it ({ENDINGS})")
            self._read[split] = self._read_all(split, source)
        return self._read[split]

    def _read_all(self, split: str, source: Source) -> list[Problem]:
        problems: list[Problem] = []
        seen: dict[str, str] = {}  # normalised question -> its place
        skipped_before = len(self.skipped)
        for index, record in enumerate(source.records()):
            try:
                if record.flaw:
                    raise DataError(record.where, record.flaw)
                problem = self.problem(f"{self.name}/{split}/{index}", record)
                where = seen.setdefault(normalised(problem.question), record.where)
                if where != record.where:
                    self._repeated(source, record, where)
                else:
                    problems.append(problem)
            except DataError as error:
                if self.settings.on_bad_record == "error":
                    is_everywhere = isinstance(error, MissingColumn) and index == 0
                    remedy = "" if is_everywhere else " task.on_bad_record=skip leaves such records out."
                    raise DataError(f"{error}{remedy}") from None
                self.skipped.append(str(error))
        if not problems:
            bad = self.skipped[skipped_before:]
            raise DataError(f"{source}: " + (f"no record can be used: {bad[0]}" if bad else "it is empty."))
        return problems

    def _repeated(self, source: Source, record: Record, first: str) -> None:
        """Raise an error for a repeated question; in a published set, which the user cannot mend, only count it."""
        message = f"{record.where}: the question of {first} again; expected each one once."
        if not isinstance(source, HubSet):
            raise DataError(message)
        self.skipped.append(message)
