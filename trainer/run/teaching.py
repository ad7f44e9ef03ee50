"""What a warm-up teaches, and the model from which the next run starts."""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.answers.strip_thinking import THOUGHTS
from trainer.config.request import Request
from trainer.config.settings import Config, Turns
from trainer.errors import CheckpointError, ConfigError, DataError
from trainer.loop import Lessons, train, warm_up
from trainer.machine import disk
from trainer.model.load import resolve_dtype
from trainer.model.merge import write_merged
from trainer.plan.read_data import Data
from trainer.problem.prompts import Prompter, end_token, taught
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, TrainingRow
from trainer.reward.built_in import Rules, read
from trainer.rollout.turns import OpenAnswer, Stops, TurnTaking
from trainer.run.assemble import Run, build, stops_of
from trainer.run_folder.run_log import RunLog

_NUMBER = re.compile(r"\s*[$£€]?\s*(-?[\d,]*\.?\d+)")
START = "start"  # a link in the folder of a warm-up to the model from which the next run starts


class LessonWriter:
    """Writes solutions as answers of the run: they end at its stops, and an inline calculator replies in them."""

    def __init__(self, limits: Turns, prompter: Prompter, stops: Stops) -> None:
        self.prompter = prompter
        self.end = end_token(prompter, stops.tokens)
        self.stops = Stops(prompter.tokenizer, [*stops.tokens, self.end], stops.strings)
        is_inline = prompter.environments is not None and prompter.environments.is_inline
        self.turns = TurnTaking(self.stops, prompter if is_inline else None, limits)

    def answer(self, prompt: Prompt) -> Completion | None:
        """Return the solution as an answer. It is None if its arithmetic is wrong, or if a stop cuts it short and there
        is no gold answer to judge the rest by."""
        closing = next((end for begin, end in THOUGHTS.items() if prompt.text.rstrip().endswith(begin)), "")
        rest = taught(prompt.problem, self.prompter.answer_style, closing)
        dialogue, answer = OpenAnswer(prompt, 0, sys.maxsize, sys.maxsize, self.stops), None
        while answer is None:
            ends = [rest.index(string) + len(string) for string in self.stops.strings if string in rest]
            turn, rest = rest[: min(ends, default=None)], rest[min(ends, default=len(rest)) :]
            tokens = (*self._tokens(dialogue, turn), *([] if ends else [self.end]))
            answer = self.turns.add(dialogue, tokens, [0.0] * len(tokens)) or self.turns.take_reply(dialogue)
            if answer is None and (reply := dialogue.turns[-1].text):
                number = _NUMBER.match(rest)
                if number is None or float(number[1].replace(",", "")) != float(reply):
                    return None
                rest = rest[number.end() :]
        return answer if prompt.problem.gold or not rest.strip() else None

    def _tokens(self, dialogue: OpenAnswer, text: str) -> Sequence[int]:
        """Return the tokens of a turn in the context of the text before it."""
        begun = "".join(turn.text for turn in dialogue.turns)
        whole, count = self.prompter.answer_tokens(dialogue.prompt, begun + text), len(dialogue.tokens)
        if [*whole[:count]] == dialogue.tokens:
            return whole[count:]
        return self.stops.tokenizer(text, add_special_tokens=False)["input_ids"]


def built(request: Request, data: Data | None = None) -> tuple[Run, Callable[[], None]]:
    """Build a run, and return it with the function that trains it, by GRPO or as a warm-up."""
    run = build(request, data)
    if not request.config.is_warmup:
        return run, partial(train, request.config, *run)
    lessons, run = lessons_of(request.config, run)
    return run, partial(warm_up, request.config, *run, lessons)


def lessons_of(config: Config, run: Run) -> tuple[Lessons, Run]:
    """Return the lessons, and the run with an evaluator that also measures the loss of held-out solutions."""
    rollouts, model = run.rollouts, run.updater.policy.model  # type: ignore[attr-defined]
    prompter, rules, problems = rollouts.prompter, rollouts.scorer.rules, rollouts.curriculum.problems
    writer = LessonWriter(config.rollout.turns, prompter, stops_of(config.rollout.stop, prompter, model))
    rows: list[TrainingRow] = []  # the model's own answers are sampled during the run
    if config.warmup.source == "solutions":
        rows = _short(rows_of(problems, writer, rules), config, run.log, len(problems), writer.stops.strings)
    held_out = rows_of([prompt.problem for prompt in run.evaluator.held_out], writer, rules)
    if config.eval.metric == "loss" and not held_out:
        remedy = "Write warmup.metric=accuracy, or leave warmup.every out"
        raise ConfigError("warmup.metric=loss", "no held-out problem has a worked solution", remedy).of_all()
    evaluator = replace(run.evaluator, loss=partial(run.updater.held_out_loss, held_out))
    return Lessons(config, rows), run._replace(evaluator=evaluator)


def rows_of(problems: Sequence[Problem], writer: LessonWriter, rules: Rules) -> list[TrainingRow]:
    """Return the rows of the problems whose solution yields the gold answer in the form in which it is taught."""
    rows = []
    for problem in problems:
        prompt = writer.prompter.prompt(problem)
        answer = writer.answer(prompt) if problem.solution else None
        if answer is None or answer.truncated:
            continue
        if not problem.gold or read(prompt, answer, rules).strict_score == 1.0:
            rows.append(TrainingRow(prompt.tokens, answer.tokens, answer.logprobs, 1.0, 1.0, written=answer.written))
    return rows


def _short(
    right: list[TrainingRow], config: Config, log: RunLog, problems: int, stops: Sequence[str]
) -> list[TrainingRow]:
    """Return the rows that are short enough, and report what is left out. Raise an error if none is left."""
    limit, lengths = config.rollout.max_new_tokens, [len(row.completion) for row in right]
    rows = [row for row in right if len(row.completion) <= limit]
    if not right:
        ended = f", and search the solutions for {json.dumps(stops)}, where an answer ends" if stops else ""
        reason = f"none of the worked solutions of {problems} problems, as it is taught, yields the gold answer"
        remedy = f"Compare the two columns, task.solution and task.answer{ended}"
        raise DataError(f"task.name={config.task.name}", reason, remedy).of_all()
    if not rows:
        reason = f"none of {len(right)} worked solutions is that short; the shortest has {min(lengths)} tokens"
        remedy = f"Write rollout.max_new_tokens={max(lengths)} for all"
        raise ConfigError(f"rollout.max_new_tokens={limit}", reason, remedy).of_all()
    lost = {
        "have no worked solution that, as it is taught, yields their answer": problems - len(right),
        f"have a longer one than rollout.max_new_tokens={limit}, and are left out": len(right) - len(rows),
    }
    for what, count in lost.items():
        if count:
            log.screen.say(f"data: {count} of {problems} problems {what}")
    return rows


def leave_start(config: Config, then: str, folder: Path) -> None:
    """Link the model from which the next run starts: the best of the warm-up, or else its last, merged into the base if
    `then` says so. Every rank calls it. The link is made last, so it marks a warm-up that is done."""
    if distributed.is_main():
        best = "best" if (folder / "best").is_dir() else config.lora.product
        if config.lora.enabled and then == "merged":
            dtype = resolve_dtype(config.model.dtype, distributed.device())
            try:
                write_merged(config.model, folder / best, folder / "merged", dtype)
            except CheckpointError as error:
                remedy = f"Make room; `--resume {shlex.quote(str(folder.parent))}` then continues after the warm-up"
                raise CheckpointError(error.key, error.reason, remedy) from error
        partial_link = folder / f"{START}.partial"
        disk.remove(partial_link)
        try:
            partial_link.symlink_to(best)
        except OSError:  # a file system without links, such as exFAT or a mounted Google Drive
            shutil.copytree(folder / best, partial_link)
        os.replace(partial_link, folder / START)
    distributed.barrier()
