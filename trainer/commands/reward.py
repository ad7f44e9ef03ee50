"""`octet reward test`: try the rewards of a run, or your own function, on texts that are known to be right or wrong.

It writes right and wrong completions of the task's problems, or takes labelled ones, and changes them as a model might
to gain reward. Without gold answers it tries what needs none. docs/rewards.md lists the findings after which the exit
status is 1.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any

from trainer.commands import score
from trainer.commands.shared_options import positive
from trainer.config.settings import Config
from trainer.errors import DataError, OctetError
from trainer.machine.safe_text import print
from trainer.plan import downloads
from trainer.problem.task import Task, make_task, normalised, training_problems
from trainer.records import Problem
from trainer.reward import gold_check
from trainer.reward.custom import Custom, required
from trainer.reward.exploits import CHANGES, Report, Sample, examine, possible_answers, samples_of
from trainer.reward.judge import Judge
from trainer.reward.make import make_scorer, worked
from trainer.reward.scorer import Scorer

SHOWN = 60  # characters of a value in the example of a labelled line


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet reward test --task gsm8k reward.custom=mine.py:score"
    parser.add_argument("action", choices=["test"])
    parser.add_argument("-n", type=positive, default=16, help="how many problems (default 16)")
    labelled = "JSON lines with completion, right (a boolean), and the answer, or a question of the task"
    parser.add_argument("--labelled", metavar="FILE", help=labelled)
    parser.add_argument("--all", action="store_true", help="list every kind of text, not only those with a finding")
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    score.add_reward_arguments(parser)


def run(options: Namespace) -> None:
    config = score.settings_for(options, options.data_dir)
    downloads.check(config, needs_data=not options.labelled)
    task = make_task(config.task)
    scorer = make_scorer(config, task)
    if options.labelled:
        samples = [*labelled(options.labelled, scorer, score.has_answers(config), task)]
    else:
        problems = training_problems(task, config.task, config.run.seed)
        gold_check.check(config, task, problems)
        samples = samples_of(problems[: options.n], scorer.rules)
    for judge in (grader for grader in scorer.graders if isinstance(grader, Judge) and samples):
        # if it cannot grade, all rewards are missing, and the findings would be wrong
        judge.rehearse(scorer.read(samples[0].prompt, worked(samples[0].prompt.problem)))
    if not any(one.right or one.wrong for one in samples):
        why = "the task has no gold answers, so only faults that show without them are looked for"
        more = "To try texts that you know to be right or wrong, write them into a file, in lines such as\n"
        more += f"{_example(scorer, samples[0].prompt.problem)}\nand name it: --labelled FILE."
        print(f"octet: {why}. {more}", file=sys.stderr)
    report = examine(scorer, samples)
    scorer.report_missing([scorer.missing(scorer.drain())])
    report.findings.extend(outvoting(config, report.among_equals))
    print(json.dumps(asdict(report), indent=2) if options.json else "\n".join(as_text(report, options.all)))
    if report.findings:
        sys.exit(1)


def outvoting(config: Config, among_equals: Mapping[str, float]) -> Iterator[str]:
    """Yield a finding if shaping alone can give an answer more than a fifth of the advantage of a lone right answer."""
    if config.rollout.dead_by == "correct" and config.drops_dead_groups:
        return  # groups that are all right or all wrong are not trained on
    size, pay = config.rollout.group_size, config.pay_of_right
    full = dict.fromkeys(("length", "overlong", "think_tags"), 1.0)  # the texts above may not show their whole range
    differs = sum(abs(weight) * full.get(name, among_equals[name]) for name, weight in config.shaping.items())
    lone = sqrt(size - 1)  # the advantage of the only answer that earns something, divided by the deviation
    is_divided = config.algorithm.advantage == "grpo" and not config.gates_shaping
    alone = lone if is_divided else differs / max(pay, differs * lone / size) * (size - 1) / size
    right = lone if config.algorithm.advantage == "grpo" else (size - 1) / size
    if config.algorithm.loss == "reinforce":  # the advantage of an answer is its reward
        alone, right, is_divided = differs, pay, False
    if differs and alone > right / 5:
        yield (
            f"in a group of {size} that is all right or all wrong, {', '.join(config.shaping)} can give one answer an "
            f"advantage of {alone:.2f}, and a lone right answer has {right:.2f}: lower the weights"
            f"{', or write reward.gate=true' if is_divided else ''}"
        )


def _example(scorer: Scorer, problem: Problem) -> str:
    """Return a labelled line with the columns of a problem that the functions ask for."""
    asked = _asked(scorer)
    columns = {"question": problem.question, **{name: problem.extra[name] for name in problem.extra if name in asked}}
    shown = {name: value if len(repr(value)) <= SHOWN else "..." for name, value in columns.items()}
    return json.dumps({**shown, "completion": "what a model may write", "right": True}, ensure_ascii=False, default=str)


def _asked(scorer: Scorer) -> set[str]:
    return {name for one in scorer.graders if isinstance(one, Custom) for name in required(one.function)}


def labelled(path: str, scorer: Scorer, needs_answer: bool, task: Task) -> Iterator[Sample]:
    """Read completions that are known to be right or wrong. A question of the task stands for its other columns."""
    rules, columns = scorer.rules, dict[str, Mapping[str, Any]]()
    asked = _asked(scorer) | ({"answer"} if needs_answer else set())
    with suppress(OctetError):  # the data may be elsewhere
        problems = [] if task.hub_sets() else [*task.train(), *task.test()]
        columns = {normalised(one.question): {"answer": one.gold, **one.extra} for one in problems}

    def filled(line: Mapping[str, Any]) -> dict[str, Any]:
        known = columns.get(normalised(str(line.get("question"))))
        others = next(iter(columns.values()), {})  # what a question of the task would stand for
        if "question" in line and known is None and (missing := sorted(asked & others.keys() - line.keys())):
            reason = f"the question {line['question']!r:.60} is not in the task, so there is no `{missing[0]}`"
            raise DataError(path, reason, "Write a question of the task, or its columns into the line")
        return {**(known or {}), **line}

    with score.open_lines(path) as lines:
        given = list(score.samples(lines, path, rules, needs_answer, {}, filled))
    golds = [prompt.problem.gold for prompt, _ in given]
    for prompt, completion in given:
        is_right = prompt.problem.extra.get("right")
        if not isinstance(is_right, bool):
            remedy = "Write true or false beside the completion"
            raise DataError(prompt.problem.id, f"`right` is {is_right!r:.60}", remedy)
        listed = possible_answers(golds, prompt.problem.gold, rules.style)
        known = {"right" if is_right else "wrong": completion.text}
        yield Sample(prompt, rules, listed, **known)


def as_text(report: Report, has_all: bool) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in report.rows for name in row["paid"] or ()))
    # of variants of an answer with the same numbers, only the first is shown
    firsts = {
        (row["text"] in CHANGES or row["text"], row["right"], repr(row["paid"])): row for row in report.rows[::-1]
    }
    rows = [row for row in report.rows if has_all or (_is_mistaken(row) and row in firsts.values())]
    is_judged = any(row["right"] is not None for row in report.rows)
    if rows:
        yield "  ".join([f"{'text':<44}", f"{'':<5}", *(f"{name:>12}" for name in names or ["mean"])])
    for row in rows:
        paid = [f"{row['paid'][name]} of {row['count']}" if row["paid"] is not None else "error" for name in names]
        paid = paid or ["none" if row["mean"] is None else f"{row['mean']:g}"]
        kind = {True: "right", False: "wrong", None: ""}[row["right"]]
        yield "  ".join([f"{row['text']:<44}", f"{kind:<5}", *(f"{share:>12}" for share in paid)])
    if others := len(report.rows) - len(rows):
        yield f"{others} {'more ' * bool(rows)}kinds of text were tested; --all lists them"
    yield ""
    for name, (least, most) in report.ranges.items():
        note = "" if name in names or not is_judged else "; it does not tell right from wrong"
        yield f"{name}: {least:g} to {most:g}{note}"
    yield f"{1000 * report.seconds:.2f} ms for one completion"
    yield ""
    yield from (f"found: {finding}" for finding in report.findings)
    if not report.findings and is_judged:
        yield "nothing found: every right text is rewarded, no wrong one is, and repeated scores are the same"
    elif not report.findings:
        yield "nothing found; what right and wrong answers earn was not tried"


def _is_mistaken(row: Mapping[str, Any]) -> bool:
    """Return True if rewards raised an error, or have paid wrong texts, or not all right ones."""
    is_known, all_right = row["right"] is not None, row["count"] if row["right"] else 0
    return row["paid"] is None or (is_known and any(count != all_right for count in row["paid"].values()))
