"""Make scorers from the settings."""

from pathlib import Path

from trainer.answers.symbolic import Symbolic
from trainer.config.settings import Config, Reward
from trainer.machine.user_code import find
from trainer.problem.prompts import answer_style, opens_thought
from trainer.problem.task import Task
from trainer.records import Completion, DeadBy, Problem, Prompt
from trainer.reward import custom
from trainer.reward.built_in import Rules, read
from trainer.reward.custom import Custom
from trainer.reward.judge import Judge, load_rubric
from trainer.reward.programs import Programs
from trainer.reward.scorer import Grader, Scorer


def check(settings: Reward) -> None:
    """Raise an error if a file that the settings name is missing, or if this machine cannot run programs."""
    for setting in settings.custom:
        find(custom.KEY, setting)
    if "judge" in settings.weights:
        load_rubric(settings.judge.rubric)
    if "code" in settings.weights:
        Programs(settings.code).sandbox.close()


def rehearse_functions(config: Config, task: Task, problem: Problem) -> None:
    """Call the functions of reward.custom once without a model, except those that may use the text of prompts."""
    rules, prompt = rules_of(config, task), Prompt(problem, problem.question, ())
    for function in (Custom(setting, config, task) for setting in config.reward.custom):
        if not function.may_read_prompts(problem):
            function.rehearse(read(prompt, worked(problem), rules))


def make_scorer(config: Config, task: Task, folder: Path | None = None) -> Scorer:
    """Make a scorer with all graders. A file in `folder` counts what the judge costs, over all ranks and restarts."""
    graders: list[Grader] = [Custom(setting, config, task) for setting in config.reward.custom]
    if "judge" in config.reward.weights:
        graders.append(Judge(config.reward.judge, folder))
    scorer = make_verifier(config, task)
    return Scorer(scorer.rules, [*scorer.graders, *graders], scorer.symbolic)


def make_verifier(config: Config, task: Task) -> Scorer:
    """Make a scorer with the rewards that decide what is correct. Evaluation needs no others, and pays for none."""
    graders = [Programs(config.reward.code)] if "code" in config.reward.weights else []
    symbolic = Symbolic(config.reward.symbolic_s) if compares_as_mathematics(config.reward, task) else None
    return Scorer(rules_of(config, task), graders, symbolic)


def rules_of(config: Config, task: Task) -> Rules:
    style, opened = answer_style(config.prompt, task), opens_thought(config.prompt, task)
    dead_by: DeadBy = "reward"
    if config.rollout.dead_by == "correct":
        dead_by = "correct_strict" if config.reward.answer == "strict" else "correct_lenient"
    return Rules(config.reward, style, config.rollout.max_new_tokens, opened, dead_by, config.pay_of_right > 0, task)


def compares_as_mathematics(settings: Reward, task: Task) -> bool:
    """Return reward.symbolic, or by default what the task asks for."""
    return task.symbolic if settings.symbolic is None else settings.symbolic


def worked(problem: Problem) -> Completion:
    """Return the worked solution of a problem as a completion for a rehearsal, with a token as every answer has."""
    return Completion((0,), (0.0,), problem.solution or problem.gold, truncated=False)
