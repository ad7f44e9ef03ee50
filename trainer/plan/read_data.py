"""Read, filter and check the data of a run, before anything heavy is imported."""

from contextlib import suppress
from typing import NamedTuple

from trainer.config.settings import Config
from trainer.errors import DataError
from trainer.problem.prompts import must_have_solutions
from trainer.problem.task import Task, evaluation_problems, make_task, training_problems
from trainer.records import Problem
from trainer.reward import gold_check, placebo
from trainer.reward.make import rehearse_functions


class Data(NamedTuple):
    """The task of a run, its training problems, and the held-out ones that are asked."""

    task: Task
    training: list[Problem]
    held_out: list[Problem]


def read(config: Config) -> Data:
    """Return the data of a run. Raise DataError for a bad record or a gold answer that cannot be earned, and
    RewardError for a function of reward.custom that cannot be used."""
    task = make_task(config.task)
    training = training_of(task, config)
    held_out = evaluation_problems(task, config.eval.problems)
    gold_check.check(config, task, [*training, *held_out])
    if config.warmup.steps and config.warmup.source == "solutions":
        must_have_solutions(task, training)
    rehearse_functions(config, task, training[0])
    return Data(task, training, held_out)


def read_held_out(config: Config) -> Data:
    """Return the data of an evaluation, which are the held-out problems alone."""
    task = make_task(config.task)
    held_out = evaluation_problems(task, config.eval.problems)
    gold_check.check(config, task, held_out)
    return Data(task, [], held_out)


def training_of(task: Task, config: Config) -> list[Problem]:
    """Return the training problems, with the gold answers of one another if a control of an experiment asks for it."""
    problems = training_problems(task, config.task, config.run.seed)
    return placebo.shuffle_golds(problems, config.reward.control, config.run.seed)


def asking_what_there_is(config: Config) -> Config:
    """Return settings that hold out no more problems than a table on this machine has, if it can be read."""
    count = config.eval.problems
    with suppress(DataError):
        if count and config.task.name == "records" and not (task := make_task(config.task)).hub_sets():
            count = min(count, len(task.test()))
    return config.model_copy(update={"eval": config.eval.model_copy(update={"problems": count})})


def count_local(config: Config) -> int | None:
    """Return the number of training problems, if the data of the task is on this machine."""
    task = make_task(config.task)
    return None if task.hub_sets() else len(training_of(task, config))
