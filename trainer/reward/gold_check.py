"""Check before a run that right answers can earn their reward: a gold answer in the asked-for form must be correct."""

import random
from collections.abc import Sequence
from dataclasses import replace

from trainer.answers import find
from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError
from trainer.problem.prompts import MARKS
from trainer.problem.task import Task
from trainer.records import Completion, Problem, Prompt
from trainer.reward.built_in import Rules, correct, read
from trainer.reward.make import rules_of
from trainer.reward.programs import read_tests

MOST = 20_000  # gold answers that can be checked in less than a second; of a larger set, only a sample is checked
SAMPLE = 1_000
SHOWN = 3  # gold answers in an error
STYLES = {"gsm8k": "style", "boxed": "style", "tags": "answer"}  # which setting of `prompt` asks for it


def check(config: Config, task: Task, problems: Sequence[Problem]) -> None:
    """Raise DataError if tests cannot run, or if gold answers are compared and no answer can match them."""
    if "code" in config.reward.weights:
        for problem in problems:
            read_tests(problem, config.reward.code)
    compares = config.reward.weights.get("correct") or config.eval.problems or config.task.curriculum == "solve_rate"
    if not compares:
        return
    if len(problems) > MOST:
        problems = random.Random(config.run.seed).sample(problems, SAMPLE)
    rules = rules_of(config, task)
    if rules.style != "tags" and any(task.part(one).name.startswith("reasoning_gym:") for one in problems):
        key = "answer" if config.prompt.answer != "auto" else "style"
        reason = "answers of reasoning_gym are read between <answer> and </answer> only"
        raise ConfigError(f"prompt.{key}={getattr(config.prompt, key)}", reason, f"Write prompt.{key}=tags")
    # a task that finds or scores answers itself may have gold answers in any form
    compared = [one for one in problems if one.gold and not (rules.own("read", one) or rules.own("score", one))]
    lost = [problem for problem in compared if not is_earned(problem, rules)]
    cut = [stop for stop in config.rollout.stop if compared and not lost and not is_earned(compared[0], rules, stop)]
    if cut:
        reason = f"it ends a completion before its answer, such as {written(compared[0], rules).text!r}"
        raise ConfigError(f"rollout.stop={cut[0]!r}", reason, "Leave it out")
    if lost:
        golds = [one.gold if len(one.gold) <= 60 else f"{one.gold[:60]}..." for one in lost[:SHOWN]]
        shown = "; ".join(f"{one.where or one.id}: {gold!r}" for one, gold in zip(lost, golds))
        reason = f"{len(lost)} of {len(problems)} gold answers cannot be earned. Written as"
        reason += f" {MARKS[rules.style].format('...')!r}, they are not read as themselves: {shown}"
        raise DataError(f"task.name={task.name}", reason, _remedy(lost, rules, config.prompt.answer != "auto"))


def is_earned(problem: Problem, rules: Rules, stop: str = "") -> bool:
    """Return True if the gold answer is correct when it is written in the asked-for form, up to a stop string."""
    answer = written(problem, rules)
    if stop and stop in answer.text:
        answer = replace(answer, text=answer.text.partition(stop)[0] + stop)
    return correct(read(Prompt(problem, "", ()), answer, rules), rules) == 1.0


def written(problem: Problem, rules: Rules) -> Completion:
    """Return a completion that is nothing but the gold answer in the asked-for form."""
    text = (f"{find.THOUGHT_END}\n" if rules.opened else "") + MARKS[rules.style].format(problem.gold)
    return Completion((), (), text, truncated=False)


def _remedy(lost: Sequence[Problem], rules: Rules, has_answer: bool) -> str:
    for style, setting in STYLES.items():
        other = Rules(rules.settings, style, rules.max_new_tokens, task=rules.task)
        if all(is_earned(problem, other) for problem in lost):
            return f"Write prompt.{'answer' if has_answer else setting}={style}, under which they are."
    return (
        "Write each on one line, in at most 400 characters. For texts that only a judge or a function of yours can "
        "grade: reward.weights.correct=0 and eval.problems=0, or task.answer=none."
    )
