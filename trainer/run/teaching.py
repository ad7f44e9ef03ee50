"""What a warm-up teaches, and what the run that follows begins with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.config.settings import Config
from trainer.errors import ConfigError, DataError
from trainer.model import merge
from trainer.model.load import resolve_dtype
from trainer.problem.lessons import LessonWriter
from trainer.ranks import distributed
from trainer.records import Completion, Problem, TrainingRow
from trainer.reward.built_in import Rules, read
from trainer.run.assemble import Run, ends
from trainer.run_folder.record import Record
from trainer.warmup import Lessons

START = "start"  # a link in the folder of a warm-up, to what the run that follows begins with


def lessons_of(config: Config, run: Run) -> tuple[Lessons, Run]:
    """Return what is taught, and the run with an evaluator that also measures the loss of held-out solutions."""
    rollouts, model = run.rollouts, run.updater.policy.model  # type: ignore[attr-defined]
    prompter, rules, problems = rollouts.prompter, rollouts.scorer.rules, rollouts.curriculum.problems
    writer = LessonWriter(prompter, *ends(config, prompter, model))
    rows: list[TrainingRow] = []  # own answers are sampled as the run goes on
    if config.warmup.source == "solutions":
        right = _right(problems, writer, rules)
        rows = [row for row in right if len(row.completion) <= config.rollout.max_new_tokens]
        _report(config, run.record, len(problems), right, rows)
    held_out = _right([prompt.problem for prompt in run.evaluator.held_out], writer, rules)
    if config.eval.metric == "loss" and not held_out:
        raise ConfigError(
            "warmup.metric=loss: no held-out problem has a worked solution. Write warmup.metric=accuracy, or leave "
            "warmup.every out."
        ).of_all()
    lessons = Lessons(config, rows, held_out)
    evaluator = replace(run.evaluator, loss=partial(lessons.held_out_loss, run.updater))
    return lessons, run._replace(evaluator=evaluator)


def _right(problems: Sequence[Problem], writer: LessonWriter, rules: Rules) -> list[TrainingRow]:
    """Return the rows of the problems whose solution, as it is taught, has the gold answer."""
    rows = []
    for problem in problems:
        if problem.solution:
            prompt = writer.prompter.prompt(problem)
            answer = Completion((), (), writer.text(prompt), truncated=False)
            if not problem.gold or read(prompt, answer, rules).strict_score == 1.0:
                rows.append(writer.row(prompt))
    return rows


def _report(
    config: Config, record: Record, problems: int, right: Sequence[TrainingRow], rows: Sequence[TrainingRow]
) -> None:
    """Say what is left out. Raise DataError if nothing is left."""
    limit, shortest = config.rollout.max_new_tokens, min((len(row.completion) for row in right), default=0)
    if not right:
        raise DataError(
            f"task.name={config.task.name}: none of the worked solutions of {problems} problems comes to the gold "
            "answer. Compare the two columns: task.solution and task.answer."
        ).of_all()
    if not rows:
        raise ConfigError(
            f"rollout.max_new_tokens={limit}: none of {len(right)} worked solutions is that short; the shortest has "
            f"{shortest} tokens. Write rollout.max_new_tokens={max(len(row.completion) for row in right)} for all."
        ).of_all()
    if len(right) < problems:
        record.screen.say(
            f"data: {problems - len(right)} of {problems} problems have no worked solution that comes to their answer"
        )
    if len(rows) < len(right):
        record.screen.say(
            f"data: {len(right) - len(rows)} of {len(right)} worked solutions are left out because they are longer "
            f"than rollout.max_new_tokens={limit}"
        )


def leave_start(config: Config, then: str, folder: Path) -> None:
    """Link what the next run begins with: the best of the warm-up, or its last, merged into the base if that is asked
    for. Every rank calls it. The link comes last, so it marks a warm-up that is done."""
    if distributed.is_main():
        best = "best" if (folder / "best").is_dir() else config.lora.product
        if config.lora.enabled and then == "merged":
            merge.merge(
                config.model, folder / best, folder / "merged", resolve_dtype(config.model.dtype, distributed.device())
            )
        partial_link = folder / f"{START}.partial"
        partial_link.unlink(missing_ok=True)
        partial_link.symlink_to(best)
        os.replace(partial_link, folder / START)
    distributed.barrier()


def is_done(folder: Path) -> bool:
    """Return True, on all ranks, if the warm-up in a folder is done."""
    return distributed.gather((folder / START).exists())[0]
