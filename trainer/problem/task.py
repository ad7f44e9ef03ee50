"""What a task is, how the settings choose one, and which of its problems a step takes."""

from __future__ import annotations

import random
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, TypeVar

from trainer.config.sections.task import BUILT_IN
from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.problem.sources import HubSet
from trainer.records import Problem

T = TypeVar("T")


class Task(ABC):
    """A source of problems."""

    name: str
    prompt_style: str  # the default of prompt.style; see `prompts.py`
    answer_style: str  # how an answer is marked; see `trainer/answers/`
    symbolic = False  # whether x(x+1) and x^2+x are one answer, where reward.symbolic is not set
    read: Callable[[Problem, str], str | None] | None = None  # finds the answer in what a model wrote
    score: Callable[[Problem, str], float] | None = None  # what an answer is worth; an answer worth 1 is correct
    environment: Callable[[Problem], Any] | None = None  # what replies to the model; see `environment.py`

    @abstractmethod
    def train(self) -> Sequence[Problem]: ...

    @abstractmethod
    def test(self) -> Sequence[Problem]: ...

    @property
    def parts(self) -> Sequence[Task]:
        """Return the tasks of a mixture, or the task itself."""
        return [self]

    def part(self, problem: Problem) -> Task:
        return self

    def later(self, passes: int) -> Task | None:
        """Return the task with the problems of a later pass, or None if every pass has the same ones."""
        return None

    def notes(self) -> list[str]:
        """Say what was left out while the problems were read, in sentences."""
        return []

    def hub_sets(self) -> list[HubSet]:
        return []


def make_task(settings: TaskSettings) -> Task:
    """Make the task that the settings name: one of Octet's, or one of a user's file."""
    place = BUILT_IN.get(settings.name.partition(":")[0], "trainer.problem.own_records:own_task")
    module, _, function = place.partition(":")
    task: Task = getattr(import_module(module), function)(settings)
    return task


def asked(problem: Problem) -> str:
    """Return what tells a problem from the held-out ones: its question, whatever the choices."""
    return normalised(problem.stem or problem.question)


def normalised(question: str) -> str:
    """Return a question in a form that ignores case, spaces and the encoding of accents."""
    return " ".join(unicodedata.normalize("NFC", question).casefold().split())


def training_problems(task: Task, settings: TaskSettings, seed: int) -> list[Problem]:
    """Return the training set in its seeded order, without questions of the test set."""
    held_out = {asked(problem) for problem in task.test()}
    problems = [problem for problem in task.train() if asked(problem) not in held_out]
    random.Random(seed).shuffle(problems)
    problems = problems[: settings.limit]
    if not problems:
        raise DataError(
            f"task.name={task.name}", "no training problem is left: the held-out set asks them all", "Add some"
        )
    return problems


def evaluation_problems(task: Task, count: int) -> list[Problem]:
    """Return `count` held-out problems, the same ones whatever the seed of the run."""
    problems = list(task.test())
    random.Random(0).shuffle(problems)
    return problems[:count]


@lru_cache(maxsize=2)  # a step may end one pass and begin another
def _order(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"{seed}/{passes}").sample(range(size), size)


def draw(problems: Sequence[T], step: int, count: int, seed: int) -> list[T]:
    """Return the problems, or rows, of a step, counted from 0. Each pass over the set has its own order and is cut into
    steps.

    The result depends on the arguments alone, so a resumed run sees what an uninterrupted one would have seen.
    """
    drawn: list[T] = []
    position = step * count
    while len(drawn) < count:
        passes, offset = divmod(position + len(drawn), len(problems))
        order = _order(seed, passes, len(problems))
        drawn += [problems[index] for index in order[offset : offset + count - len(drawn)]]
    return drawn
