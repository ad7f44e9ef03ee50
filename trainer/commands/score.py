"""`octet score`: score the completions in a file as a run would. Input and output are JSON lines in the same order;
docs/rewards.md lists their keys."""

import contextlib
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from trainer.commands.shared_options import TASKS, add_overrides
from trainer.config.resolve import overrides_of, resolve
from trainer.config.settings import Config
from trainer.errors import DataError, OctetError
from trainer.machine.safe_text import print
from trainer.plan.read_data import training_of
from trainer.problem.own_records import gold_of
from trainer.problem.sources import json_records
from trainer.problem.task import make_task
from trainer.records import Completion, Problem, Prompt
from trainer.reward.built_in import COMPONENTS, Rules
from trainer.reward.make import make_scorer
from trainer.reward.scorer import Scorer
from trainer.watch.footer import PATIENCE_S, Progress

LINES_AT_ONCE = 64  # for graders, which score lines in parallel

Sample = tuple[Prompt, Completion]


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet score labelled.jsonl --task gsm8k"
    parser.add_argument("file", help="lines with completion and answer, or a run's samples.jsonl; - is standard input")
    add_reward_arguments(parser)


def add_reward_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--task", help=f"{TASKS}; by default nano")
    parser.add_argument("--preset", help="take the other settings from this preset, or from the config.yaml of a run")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    add_overrides(parser, "reward.custom=mine.py:score")


def run(options: Namespace) -> None:
    if options.task == "records":  # these completions are the records
        options.overrides[:0] = overrides_of({"task.path": options.file})
    settings = Path(options.file).parent / "config.yaml"  # of the run that wrote the file
    is_of_run = not options.preset and options.file != "-" and settings.is_file()
    if is_of_run:
        print(f"octet: with the settings of {settings}; --preset names others", file=sys.stderr)
        options.preset = str(settings)
    score_file(settings_for(options), options.file, is_of_run)


def settings_for(options: Namespace, data_dir: Path | None = None) -> Config:
    """Return the settings with the embedded model, because no model is loaded and this one always exists."""
    named = {"task.name": options.task, "task.data_dir": data_dir and str(data_dir), "model.name": "nano"}
    return resolve(options.preset, options.recipe, [*overrides_of(named), *options.overrides])


def score_file(config: Config, path: str, is_of_run: bool) -> None:
    config, known = with_every_component(config), dict[str, Problem]()
    task = make_task(config.task)
    scorer = make_scorer(config, task)
    if is_of_run:
        with contextlib.suppress(OctetError):  # the data may be elsewhere
            known = {problem.id: problem for problem in [*training_of(task, config), *task.test()]}
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(open_lines(path))
        try:
            shows_progress = path != "-" and not sys.stdout.isatty()
            total = os.fstat(lines.fileno()).st_size if shows_progress else 0
            progress = stack.enter_context(Progress(f"scoring {path}", total, patience=PATIENCE_S)) if total else None
            name = "standard input" if path == "-" else path
            for record in scored(samples(lines, name, scorer.rules, has_answers(config), known), scorer):
                sys.stdout.write(json.dumps(record) + "\n")
                if progress:
                    progress.advance(lines.tell() - progress.done)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    measured = scorer.drain()
    scorer.report_missing([scorer.missing(measured)])
    if hangs := measured.get("symbolic/hangs", (0, 0))[0]:
        print(f"octet: {hangs:.0f} symbolic comparisons took too long and count as different.", file=sys.stderr)


def has_answers(config: Config) -> bool:
    return config.task.answer != "none" and "code" not in config.reward.weights


def with_every_component(config: Config) -> Config:
    """Give every built-in component without a weight the weight 0, so that it is shown but does not count."""
    weights = {**{name: 0.0 for name in COMPONENTS if name != "environment"}, **config.reward.weights}
    return config.changed({"reward.weights": weights})


def scored(given: Iterator[Sample], scorer: Scorer) -> Iterator[dict[str, Any]]:
    while batch := list(islice(given, LINES_AT_ONCE if scorer.graders else 1)):
        for score in scorer.scores(batch):
            read = {name: getattr(score, name) for name in ("strict", "lenient", "correct_strict", "correct_lenient")}
            yield {**read, **score.components, "reward": score.reward}


def samples(
    lines: Iterable[bytes],
    name: str,
    rules: Rules,
    needs_answer: bool,
    known: Mapping[str, Problem],
    filled: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> Iterator[Sample]:
    decimal = rules.task.decimal if rules.task else "point"
    record = None
    for record in json_records(lines, name):
        if record.flaw:
            raise DataError(record.where, record.flaw)
        prompt, completion = _sample(filled(record.values), record.where, needs_answer, decimal)
        of_run = known.get(str(record.values.get("problem")))
        if of_run and of_run.gold == prompt.problem.gold:  # with its columns, unless the data have changed
            prompt = replace(prompt, problem=of_run)
        yield prompt, completion
    if record is None:
        raise DataError(name, "it has no completions", "Write one in each line")


def open_lines(path: str) -> IO[bytes]:
    try:
        return sys.stdin.buffer if path == "-" else Path(os.path.expanduser(path)).open("rb")
    except OSError as error:
        remedy = "Name a file of JSON lines; - is standard input"
        raise DataError(path, f"it cannot be read: {error.strerror}", remedy) from None


def _sample(record: dict[str, Any], where: str, needs_answer: bool, decimal: str) -> Sample:
    decimal = decimal if isinstance(record.get("answer"), str) else "point"  # as numbers and a run's `gold` have
    completion, answer = record.pop("completion", None), record.pop("answer", record.get("gold"))
    if not isinstance(completion, str):
        raise DataError(where, f"`completion` is {completion!r:.60}", "Write the text of the completion")
    if answer is None and not needs_answer:
        answer = ""
    if type(answer) in (int, float):
        answer = str(answer)
    if not isinstance(answer, str) or (not (gold := gold_of(answer, decimal)) and needs_answer):
        raise DataError(where, f"`answer` is {answer!r:.60}", "Write the gold answer, or a solution that ends with it")
    tokens, reward = record.get("tokens", []), record.get("reward/environment")
    if type(tokens) is int:  # the number of them, in the eval_answers.jsonl of a run
        tokens = []
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise DataError(where, f"`tokens` is {tokens!r:.60}", "Write a list of token ids, or leave it out")
    if reward is not None and not isinstance(reward, int | float):  # from the samples.jsonl of a run
        raise DataError(where, f"`reward/environment` is {reward!r:.60}", "Write a number, or leave it out")
    columns = {**record, "answer": answer}  # a function gets the column unchanged, as in training
    question = record.get("question", record.get("prompt", ""))
    prompt = record.get("prompt", question)  # a text, or a list of chat messages
    messages = tuple(prompt) if isinstance(prompt, list) and all(isinstance(one, dict) for one in prompt) else ()
    problem = Problem(str(record.get("id", where)), _text(question), gold, answer, columns, messages)
    completed = Completion(tuple(tokens), (), completion, truncated=False, reward=reward)
    return Prompt(problem, _text(prompt), ()), completed


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
