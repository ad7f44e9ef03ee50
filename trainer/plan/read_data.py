"""Read, filter and check the data of a run, before anything heavy is imported."""

from contextlib import suppress
from typing import NamedTuple

from trainer.config.settings import Config
from trainer.errors import DataError
from trainer.problem.prompts import must_have_solutions
from trainer.problem.task import Task, evaluation_problems, make_task, training_problems
from trainer.records import Problem
from trainer.reward import control_rewards, gold_check
from trainer.reward.make import rehearse_functions


class Data(NamedTuple):
    """The task of a run, its training problems, and the held-out problems of its evaluations."""

    task: Task
    training: list[Problem]
    held_out: list[Problem]


def read(config: Config) -> Data:
    """Return the data of a run. Raise DataError for an invalid record or a gold answer that scores no reward, and
    RewardError for an unusable function of reward.custom."""
    task = make_task(config.task)
    training = training_of(task, config)
    held_out = evaluation_problems(task, config.eval.problems)
    gold_check.check(config, task, [*training, *held_out])
    if config.warmup.steps and config.warmup.source == "solutions":
        must_have_solutions(task, training)
    rehearse_functions(config, task, training[0])
    return Data(task, training, held_out)


def read_held_out(config: Config) -> Data:
    """Return the data of an evaluation: only the held-out problems."""
    task = make_task(config.task)
    held_out = evaluation_problems(task, config.eval.problems)
    gold_check.check(config, task, held_out)
    return Data(task, [], held_out)


def training_of(task: Task, config: Config) -> list[Problem]:
    """Return the training problems, whose gold answers are shuffled if `reward.control` says so."""
    problems = training_problems(task, config.task, config.run.seed)
    columns = (config.task.answer or "answer", config.task.solution or "solution", "made_by")
    return control_rewards.shuffle_golds(problems, config.reward.control, config.run.seed, columns)


def asking_what_there_is(config: Config) -> Config:
    """Return the configuration with at most as many held-out problems as a local table has, if it can be read."""
    count = config.eval.problems
    with suppress(DataError):
        if count and config.task.name == "records" and not (task := make_task(config.task)).hub_sets():
            count = min(count, len(task.test()))
    return config.changed({"eval.problems": count})


def count_local(config: Config) -> int | None:
    """Return the number of training problems; None if the data of the task is not on this machine."""
    task = make_task(config.task)
    return None if task.hub_sets() else len(training_of(task, config))
