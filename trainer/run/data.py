"""The data of a run as its model sees them: prompts, and the order in which they are drawn."""

import hashlib
import heapq
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.settings import Config, TaskSettings
from trainer.errors import ConfigError, DataError
from trainer.machine import disk
from trainer.plan.read_data import Data, training_of
from trainer.problem import datasheet
from trainer.problem.curriculum import CURRICULA, Curriculum
from trainer.problem.environment import environments_of
from trainer.problem.own_records import RecordsTask
from trainer.problem.prompts import Prompter
from trainer.problem.task import Task, make_task
from trainer.ranks import distributed
from trainer.records import Problem, Prompt
from trainer.reward import gold_check
from trainer.run_folder.reader import read_run
from trainer.watch.screen import Screen


class Prompts(NamedTuple):
    """The data of a run as its model sees them."""

    prompter: Prompter
    problems: list[Problem]  # to train on: those whose prompt is not too long
    longest: Prompt
    total_steps: int
    curriculum: Curriculum
    held_out: list[Prompt]


def make_prompts(config: Config, data: Data, tokenizer: Any) -> Prompts:
    prompter = prompter_of(config, data.task, tokenizer)
    problems = prompter.fitting(data.training)
    total_steps = config.total_steps(len(problems))
    # Only the longest texts are tokenised, to find the longest prompt.
    candidates = heapq.nlargest(64, problems, key=lambda problem: len(problem.question))
    longest = max(map(prompter.prompt, candidates), key=lambda prompt: len(prompt.tokens))

    def later(passes: int) -> Sequence[Problem]:
        """Return the problems of a later pass, except those with a prompt longer than `longest`, or the first ones."""
        task: Any = data.task.later(passes)
        with suppress(DataError):
            return prompter.fitting(training_of(task, config), len(longest.tokens))
        return problems

    changes = data.task.later(1) and not config.task.limit
    kind = CURRICULA[config.task.curriculum]
    curriculum = kind(problems, config.rollout.problems, config.run.seed, total_steps, later if changes else None)
    held_out = [prompter.prompt(problem) for problem in data.held_out]
    return Prompts(prompter, problems, longest, total_steps, curriculum, held_out)


def task_of(settings: TaskSettings, run: Path | None) -> Task:
    """Return the task of a model. The facts that prompts need come from its run, so that no data are read."""
    task = make_task(settings)
    if isinstance(task, RecordsTask) and run and "in_words" in (facts := read_run(run).data):
        task.in_words = facts["in_words"]
    return task


def prompter_of(config: Config, task: Task, tokenizer: Any) -> Prompter:
    """Return the prompter of a task, with its tools or environment."""
    tools = environments_of(task, config.task, tokenizer.chat_template, config.rollout.turns.seconds)
    if config.task.agent and (tools or not tokenizer.chat_template):
        reason = f"{tools.setting} has an environment" if tools else "the model has no chat template for its messages"
        raise ConfigError(f"task.agent={config.task.agent}", reason, "Take another task, or another model")
    if tools is None and config.reward.weights.get("environment") and not config.task.agent:
        reason = f"nothing gives this reward, because task.name={config.task.name} has no environment"
        remedy = "Leave it out; docs/environments.md says how to have one"
        raise ConfigError(f"reward.weights.environment={config.reward.weights['environment']:g}", reason, remedy)
    return Prompter(tokenizer, config.prompt, task, tools)


def report(
    folder: Path, screen: Screen, data: Data, problems: Sequence[Problem], checksums: str, held_out: int
) -> None:
    """Report what was read and left out, on the screen and in the run folder."""
    notes = data.task.notes()
    if too_long := len(data.training) - len(problems):
        notes.append(f"training problems left out because they are longer than prompt.max_tokens: {too_long}")
    if left_out := len(data.held_out) - held_out:
        notes.append(f"held-out problems left out because they exceed the context with an answer: {left_out}")
    is_small = data.task.name == "records" and len(data.training) <= gold_check.MOST
    if is_small and (odd := datasheet.facts_of(data.task, [*data.training, *data.held_out])["odd"]):
        count, first = sum(one["count"] for one in odd), odd[0]["gold"]
        notes.append(f"answers unlike the others: {count}, such as {first!r:.40}; `octet task show` lists them")
    for note in notes:
        screen.say(f"data: {note}")
    if distributed.is_main():
        text = "\n".join(f"{problem.question}\t{problem.gold}" for problem in problems)
        digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()
        facts = {"task": data.task.name, "training_problems": len(problems), "sha256": digest}
        facts |= {"checksums": checksums, "held_out": held_out}
        facts |= {"test_problems": len(data.task.test()), "notes": notes, "in_words": data.task.in_words}
        disk.replace(folder / "data.json", (json.dumps(facts, indent=2) + "\n").encode())
