"""`octet reward test`: try the rewards of a run, or your own function, on texts that are known to be right or wrong.

It writes right and wrong completions of the task's problems, or takes labelled ones, and changes them as a model might
to gain reward. docs/rewards.md lists the findings after which the exit status is 1.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any

from trainer.commands import score
from trainer.commands.shared_options import positive
from trainer.config.settings import Config
from trainer.errors import DataError
from trainer.machine.safe_text import print
from trainer.plan import downloads
from trainer.problem.task import make_task, training_problems
from trainer.reward import gold_check
from trainer.reward.built_in import Rules
from trainer.reward.exploits import Report, Sample, examine, possible_answers, samples_of
from trainer.reward.judge import Judge
from trainer.reward.make import make_scorer, rules_of, worked
from trainer.watch.footer import Progress


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet reward test --task gsm8k reward.custom=mine.py:score"
    parser.add_argument("action", choices=["test"])
    parser.add_argument("-n", type=positive, default=16, help="how many problems (default 16)")
    parser.add_argument("--labelled", metavar="FILE", help="JSON lines with completion, answer and right, a boolean")
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--json", action="store_true", help="print JSON")
    score.add_reward_arguments(parser)


def run(options: Namespace) -> None:
    config = score.settings_for(options, options.data_dir)
    downloads.check(config, needs_data=not options.labelled)
    task = make_task(config.task)
    rules = rules_of(config, task)
    if options.labelled:
        samples = [*labelled(options.labelled, rules, score.has_answers(config))]
    else:
        problems = training_problems(task, config.task, config.run.seed)
        gold_check.check(config, task, problems)
        samples = samples_of(problems[: options.n], rules.style, rules.opened)
    scorer = make_scorer(config, task)
    for judge in (grader for grader in scorer.graders if isinstance(grader, Judge) and samples):
        # if it cannot grade, all rewards are missing, and the findings would be wrong
        judge.rehearse(scorer.read(samples[0].prompt, worked(samples[0].prompt.problem)))
    report = examine(scorer, samples, _watched)
    scorer.report_missing([scorer.missing(scorer.drain())])
    report.findings.extend(outvoting(config, report.among_equals))
    print(json.dumps(asdict(report), indent=2) if options.json else "\n".join(as_text(report)))
    if report.findings:
        sys.exit(1)


def _watched(calls: Sequence[Any]) -> Iterator[Any]:
    with Progress("scoring", len(calls)) as progress:
        for call in calls:
            yield call
            progress.advance()


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


def labelled(path: str, rules: Rules, needs_answer: bool) -> Iterator[Sample]:
    """Read completions that are known to be right or wrong."""
    with score.open_lines(path) as lines:
        given = list(score.samples(lines, path, rules, needs_answer, {}))
    golds = [prompt.problem.gold for prompt, _ in given]
    for prompt, completion in given:
        is_right = prompt.problem.extra.get("right")
        if not isinstance(is_right, bool):
            remedy = "Write true or false beside the completion"
            raise DataError(prompt.problem.id, f"`right` is {is_right!r:.60}", remedy)
        listed = possible_answers(golds, prompt.problem.gold, rules.style)
        known = {"right" if is_right else "wrong": completion.text}
        yield Sample(prompt, rules.style, rules.opened, listed, **known)


def as_text(report: Report) -> Iterator[str]:
    names = list(dict.fromkeys(name for row in report.rows for name in row["paid"] or ()))
    yield "  ".join([f"{'text':<44}", f"{'':<5}", *(f"{name:>12}" for name in names)])
    for row in report.rows:
        paid = [f"{row['paid'][name]} of {row['count']}" if row["paid"] is not None else "error" for name in names]
        kind = "right" if row["right"] else "wrong"
        yield "  ".join([f"{row['text']:<44}", kind, *(f"{share:>12}" for share in paid)])
    yield ""
    for name, (least, most) in report.ranges.items():
        yield f"{name}: {least:g} to {most:g}{'' if name in names else '; it does not tell right from wrong'}"
    yield f"{1000 * report.seconds:.2f} ms for one completion"
    yield ""
    yield from (f"found: {finding}" for finding in report.findings)
    if not report.findings:
        yield "nothing found: every right text is paid and no wrong one is, the same every time"
