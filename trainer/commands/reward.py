"""`octet reward test`: try the rewards of a run, or your own function, on texts whose worth is known.

It writes right and wrong completions of the task's problems, or takes labelled ones, and changes them as a model might
to be paid. The exit status is 1 if a wrong text is paid or keeps much of what a right one earns, if a right one is not
paid, or if a reward is not deterministic, bounded and quick.
"""

import json
import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from trainer.commands import score
from trainer.errors import ConfigError, DataError
from trainer.machine.visible import print
from trainer.plan import downloads
from trainer.problem.task import make_task
from trainer.reward import gold_check
from trainer.reward.built_in import Rules
from trainer.reward.exploits import Report, Sample, examine, possible_answers, samples_of, start_of
from trainer.reward.make import make_scorer, rules_of


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet reward test --task gsm8k reward.custom=mine.py:score"
    parser.add_argument("action", choices=["test"])
    parser.add_argument("-n", type=int, default=16, help="how many problems (default 16)")
    parser.add_argument(
        "--labelled", metavar="FILE", help="completions as for `octet score`, each with `right`: true or false"
    )
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    score.add_reward_arguments(parser)


def run(options: Namespace) -> None:
    if options.n < 1:
        raise ConfigError(
            f"-n {options.n}", "at least one problem is needed to try a reward with", "Leave it out for 16"
        )
    config = score.settings_for(options, options.data_dir)
    downloads.check(config)
    task = make_task(config.task)
    rules = rules_of(config, task)
    if options.labelled:
        samples = labelled(options.labelled, rules, needs_answer="code" not in config.reward.weights)
    else:
        problems = list(task.train())
        gold_check.check(config, task, problems)
        random.Random(config.run.seed).shuffle(problems)
        samples = samples_of(problems[: options.n], rules.style, rules.opened)
    report = examine(make_scorer(config, task), samples)
    print(json.dumps(asdict(report), indent=2) if options.json else "\n".join(as_text(report)))
    if report.findings:
        sys.exit(1)


def labelled(path: str, rules: Rules, needs_answer: bool) -> list[Sample]:
    """Read completions that are known to be right or wrong."""
    with score.open_lines(path) as lines:
        given = list(score.samples(lines, path, needs_answer))
    golds_there = [prompt.problem.gold for prompt, _ in given]
    samples = []
    for prompt, completion in given:
        is_right = prompt.problem.extra.get("right")
        if not isinstance(is_right, bool):
            reason = f"`right` is {is_right!r:.60}"
            raise DataError(prompt.problem.id, reason, "Write true or false beside the completion")
        listed = possible_answers(golds_there, prompt.problem.gold, rules.style)
        known = {"right" if is_right else "wrong": completion.text}
        samples.append(Sample(prompt, rules.style, start_of(rules.opened, rules.style), listed, **known))
    return samples


def as_text(report: Report) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in report.rows for name in row["paid"] or ()))
    yield "  ".join([f"{'text':<44}", f"{'':<5}", *(f"{name:>12}" for name in names)])
    for row in report.rows:
        paid = [f"{row['paid'][name]} of {row['count']}" if row["paid"] is not None else "error" for name in names]
        kind = "right" if row["right"] else "wrong"
        yield "  ".join([f"{row['text']:<44}", kind, *(f"{share:>12}" for share in paid)])
    yield ""
    for name, (least, most) in report.ranges.items():
        told = "" if name in names else "; it does not tell right from wrong"
        yield f"{name}: {least:g} to {most:g}{told}"
    yield f"{1000 * report.seconds:.2f} ms for one completion"
    yield ""
    yield from (f"found: {finding}" for finding in report.findings)
    if not report.findings:
        yield "nothing found: every right text is paid and no wrong one, the same every time"
