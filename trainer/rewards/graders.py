"""From the settings to a scorer with everything that it asks for."""

from __future__ import annotations

import atexit

from trainer.config import Config
from trainer.rewards import custom
from trainer.rewards.components import Rules
from trainer.rewards.custom import Custom
from trainer.rewards.isolated import SymbolicPool
from trainer.rewards.judge import Judge, load_rubric
from trainer.rewards.scorer import Grader, Scorer
from trainer.tasks.base import Task
from trainer.tasks.prompts import answer_style
from trainer.types import Completion, Problem


def check(config: Config) -> None:
    """What can be known before anything heavy is imported: are the files there that the rewards name?"""
    for setting in config.reward.custom:
        custom.find(setting)
    if "judge" in config.reward.weights:
        load_rubric(config.reward.judge.rubric)


def make_scorer(config: Config, task: Task, ranks: int = 1) -> Scorer:
    """With all graders. The budget of the judge is shared out over the ranks."""
    graders: list[Grader] = [Custom(setting, config.reward) for setting in config.reward.custom]
    if "judge" in config.reward.weights:
        graders.append(Judge(config.reward.judge, ranks))
    scorer = make_verifier(config, task)
    return Scorer(scorer.rules, graders, scorer.symbolic)


def make_verifier(config: Config, task: Task) -> Scorer:
    """Built-in rewards only: what evaluation needs, at no cost."""
    rules = Rules(config.reward, answer_style(config.prompt, task), config.rollout.max_new_tokens)
    if not compares_as_mathematics(config, task):
        return Scorer(rules)
    pool = SymbolicPool(deadline_s=config.reward.symbolic_s)
    atexit.register(pool.close)
    return Scorer(rules, symbolic=pool)


def compares_as_mathematics(config: Config, task: Task) -> bool:
    """As the setting says, else as the task does."""
    asked = config.reward.symbolic
    return bool(getattr(task, "symbolic", False)) if asked is None else asked


def worked(problem: Problem) -> Completion:
    """A completion to rehearse with: the worked solution of the problem."""
    return Completion((), (), problem.solution or problem.gold, truncated=False)
