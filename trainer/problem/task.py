"""What every task offers, and the way from its name to the object."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.problem.dataset import DataTask, normalised
from trainer.problem.sources import HubSet
from trainer.records import Problem


class Task(Protocol):
    """A source of problems."""

    @property
    def name(self) -> str: ...

    @property
    def prompt_style(self) -> str:
        """How it is asked when nobody says otherwise; see `prompts.py`."""

    @property
    def answer_style(self) -> str:
        """How an answer is marked; see `trainer/answers/`."""

    def train(self) -> Sequence[Problem]: ...

    def test(self) -> Sequence[Problem]: ...


def _nano(settings: TaskSettings) -> Task:
    from trainer.problem.word_problems import NanoTask

    return NanoTask()


def _gsm8k(settings: TaskSettings) -> Task:
    from trainer.problem.gsm8k import Gsm8kTask

    return Gsm8kTask(settings)


def _math(settings: TaskSettings) -> Task:
    from trainer.problem.competition_math import MathTask

    return MathTask(settings)


def _multiple_choice(settings: TaskSettings) -> Task:
    from trainer.problem.multiple_choice import MultipleChoiceTask

    return MultipleChoiceTask(settings)


def _records(settings: TaskSettings) -> Task:
    from trainer.problem.own_records import RecordsTask

    return RecordsTask(settings)


TASKS: dict[str, Callable[[TaskSettings], Task]] = {
    "nano": _nano,
    "gsm8k": _gsm8k,
    "math": _math,
    "multiple_choice": _multiple_choice,
    "records": _records,
}


def make_task(settings: TaskSettings) -> Task:
    return TASKS[settings.name](settings)


def training_problems(task: Task, settings: TaskSettings, seed: int) -> list[Problem]:
    """The training set in its seeded order, without questions that the test set also asks."""
    held_out = {normalised(problem.question) for problem in task.test()}
    problems = [problem for problem in task.train() if normalised(problem.question) not in held_out]
    random.Random(seed).shuffle(problems)
    problems = problems[: settings.limit]
    if not problems:
        raise DataError(f"task.name={task.name}: no training problem is left.")
    return problems


def evaluation_problems(task: Task, count: int) -> list[Problem]:
    """The same `count` held-out problems every time, whatever the seed of the run."""
    problems = list(task.test())
    random.Random(0).shuffle(problems)
    return problems[:count]


def notes(task: Task) -> list[str]:
    """What was left out while the problems were read; nothing for a task that makes its own."""
    return task.notes() if isinstance(task, DataTask) else []


def hub_sets(settings: TaskSettings) -> list[HubSet]:
    """The data sets on the hub that the task reads."""
    task = make_task(settings)
    return task.hub_sets() if isinstance(task, DataTask) else []


@lru_cache(maxsize=2)  # a step may end one pass and begin another
def _order(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"{seed}/{passes}").sample(range(size), size)


def draw(problems: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The problems of a step (counted from 0): the set in an order of its own for each pass, cut into steps.

    A function of its arguments alone, so a resumed run sees what the undisturbed one would have seen.
    """
    drawn: list[Problem] = []
    position = step * count
    while len(drawn) < count:
        passes, offset = divmod(position + len(drawn), len(problems))
        order = _order(seed, passes, len(problems))
        drawn += [problems[index] for index in order[offset : offset + count - len(drawn)]]
    return drawn
