"""`octet play`: a person answers in place of the model and sees the reward. That shows at once if a reward is wrong."""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.commands.score import add_reward_arguments, settings_for, with_every_component
from trainer.machine.visible import print
from trainer.plan import downloads
from trainer.problem.environment import Environments, environments_of
from trainer.problem.task import make_task
from trainer.records import Completion, Problem, Prompt, Score
from trainer.reward import gold_check
from trainer.reward.make import make_scorer


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet play --task gsm8k"
    add_reward_arguments(parser)
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")


def run(options: Namespace) -> None:
    config = with_every_component(settings_for(options, options.data_dir))
    downloads.check(config)
    task = make_task(config.task)
    scorer = make_scorer(config, task)
    problems = list(task.train())
    gold_check.check(config, task, problems)
    random.Random(config.run.seed).shuffle(problems)
    completions = typed(sys.stdin)
    print("Write what the model would write; an empty line ends it, and Ctrl-D ends the game.")
    environments = environments_of(task, config.task)
    for problem in problems:
        completion = played(problem, completions, environments)
        if completion is None:
            return
        group = scorer.score(Prompt(problem, problem.question, ()), [completion])
        print("\n".join(verdict(problem, group.scores[0], scorer.weights)), flush=True)


def played(problem: Problem, texts: Iterator[str], environments: Environments | None) -> Completion | None:
    """Ask, and return what the person answers at last, with the rewards of the environment; None at the end."""
    environment, asked = environments.begin(problem) if environments else (None, None)
    print(f"\n{problem.id}: {asked or problem.question}\n", flush=True)
    reward = None
    for text in texts:
        said, done, gained = "", True, None
        if environments and environment:
            said, done, gained = environments.step(environment, problem, text)
            reward = (reward or 0.0) + gained
        if done:
            return Completion((), (), text, truncated=False, reward=reward)
        print(f"> {said}\n", flush=True)
    return None


def typed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts that were typed, each ended by an empty line or by the end of the input."""
    text: list[str] = []
    for line in lines:
        if line.strip():
            text.append(line.rstrip("\n"))
        elif text:
            yield "\n".join(text)
            text = []
    if text:
        yield "\n".join(text)


def verdict(problem: Problem, score: Score, weights: dict[str, float]) -> Iterator[str]:
    yield f"  {'gold':<12} {problem.gold!r}"
    strict, lenient = (score.strict, score.correct_strict), (score.lenient, score.correct_lenient)
    for name, (found, is_right) in {"strict": strict, "lenient": lenient}.items():
        told = "nothing found" if found is None else f"{found!r} is {'right' if is_right else 'wrong'}"
        yield f"  {name:<12} {told}"
    for name, value in {**score.components, "reward": score.reward}.items():
        number = "    none" if value is None else f"{value:8.3f}"
        yield f"  {name:<12} {number}" + (f"  x {weights[name]:g}" if name in score.components else "")
