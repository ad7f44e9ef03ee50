"""The interface of a task, and how the settings choose one."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol, TypeVar

from trainer.config.sections.task import BUILT_IN
from trainer.config.settings import TaskSettings
from trainer.errors import DataError
from trainer.machine import user_code
from trainer.problem.dataset import DataTask, asked
from trainer.problem.own_records import OwnTask
from trainer.problem.sources import HubSet
from trainer.records import Problem

T = TypeVar("T")


class Task(Protocol):
    """A source of problems.

    It may have two more methods: `read(problem, text)` finds the answer in what a model wrote, or returns None, and
    `score(problem, answer)` says what an answer is worth, from 0 to 1. An answer is correct if it is worth 1. A task
    that makes up its problems may have `later(passes)`, which returns the task with the problems of a later pass.
    """

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


def make_task(settings: TaskSettings) -> Task:
    """Make the task that the settings name: one of Octet's, or one of a user's file."""
    if place := BUILT_IN.get(settings.name.partition(":")[0]):
        module, _, function = place.partition(":")
        task: Task = getattr(import_module(module), function)(settings)
        return task
    path, build = user_code.find("task.name", settings.name), user_code.load("task.name", settings.name)
    built = user_code.call(f"task.name={settings.name}: it raised ", path, lambda: build(settings))
    return built if isinstance(built, DataTask) else OwnTask(settings, built)


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


def data_tasks(task: Task) -> list[DataTask]:
    """Return the parts of a task that read their problems. Others make them up, and leave nothing out."""
    parts: Iterable[Any] = getattr(task, "parts", [task])
    return [part for part in parts if isinstance(part, DataTask)]


def notes(task: Task) -> list[str]:
    """Say what was left out while the problems were read."""
    return [note for part in data_tasks(task) for note in part.notes()]


def hub_sets(task: Task) -> list[HubSet]:
    """Return the data sets on the hub that a task reads."""
    return [found for part in data_tasks(task) for found in part.hub_sets()]


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
