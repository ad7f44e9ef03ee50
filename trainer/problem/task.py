"""The interface of a task, and the table of tasks by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Protocol

from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.problem.competition_math import MathTask
from trainer.problem.dataset import DataTask, asked
from trainer.problem.gsm8k import Gsm8kTask
from trainer.problem.multiple_choice import MultipleChoiceTask
from trainer.problem.own_records import RecordsTask
from trainer.problem.sources import HubSet
from trainer.problem.word_problems import NanoTask
from trainer.records import Problem


class Task(Protocol):
    """A source of problems."""

    @property
    def name(self) -> str: ...

    @property
    def prompt_style(self) -> str:
        """Return the default of prompt.style; see `prompts.py`."""

    @property
    def answer_style(self) -> str:
        """Return how an answer is marked; see `trainer/answers/`."""

    def train(self) -> Sequence[Problem]: ...

    def test(self) -> Sequence[Problem]: ...


TASKS: dict[str, Callable[[TaskSettings], Task]] = {
    "nano": lambda settings: NanoTask(),
    "gsm8k": Gsm8kTask,
    "math": MathTask,
    "multiple_choice": MultipleChoiceTask,
    "records": RecordsTask,
}


def make_task(settings: TaskSettings) -> Task:
    return TASKS[settings.name](settings)


def training_problems(task: Task, settings: TaskSettings, seed: int) -> list[Problem]:
    """Return the training set in its seeded order, without questions of the test set."""
    held_out = {asked(problem) for problem in task.test()}
    problems = [problem for problem in task.train() if asked(problem) not in held_out]
    random.Random(seed).shuffle(problems)
    problems = problems[: settings.limit]
    if not problems:
        raise DataError(f"task.name={task.name}: no training problem is left.")
    return problems


def evaluation_problems(task: Task, count: int) -> list[Problem]:
    """Return `count` held-out problems, the same ones whatever the seed of the run."""
    problems = list(task.test())
    random.Random(0).shuffle(problems)
    return problems[:count]


def notes(task: Task) -> list[str]:
    """Say what was left out while the problems were read. A task that makes its own leaves nothing out."""
    return task.notes() if isinstance(task, DataTask) else []


def hub_sets(settings: TaskSettings) -> list[HubSet]:
    """Return the data sets on the hub that the task reads."""
    task = make_task(settings)
    return task.hub_sets() if isinstance(task, DataTask) else []


@lru_cache(maxsize=2)  # a step may end one pass and begin another
def _order(seed: int, passes: int, size: int) -> list[int]:
    return random.Random(f"{seed}/{passes}").sample(range(size), size)


def draw(problems: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """Return the problems of a step, counted from 0. Each pass over the set has its own order and is cut into steps.

    The result depends on the arguments alone, so a resumed run sees what an uninterrupted one would have seen.
    """
    drawn: list[Problem] = []
    position = step * count
    while len(drawn) < count:
        passes, offset = divmod(position + len(drawn), len(problems))
        order = _order(seed, passes, len(problems))
        drawn += [problems[index] for index in order[offset : offset + count - len(drawn)]]
    return drawn
