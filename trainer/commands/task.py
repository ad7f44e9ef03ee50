"""`octet task`: show the problems of a task and the exact text that a model would see, or answer them in its place.

A person who answers a few problems sees quickly whether a reward is wrong.
"""

import json
import logging
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from trainer.commands.score import with_every_component
from trainer.commands.shared_options import TASKS, add_overrides
from trainer.config.resolve import overrides_of, resolve
from trainer.config.settings import Config
from trainer.errors import ConfigError
from trainer.machine.safe_text import print
from trainer.plan import downloads
from trainer.problem import datasheet
from trainer.problem.environment import Environments, environments_of
from trainer.problem.task import Task, evaluation_problems, make_task, training_problems
from trainer.records import Completion, Problem, Prompt, Score
from trainer.reward import gold_check
from trainer.reward.make import make_scorer

MEASURED = 10_000  # prompts whose length is measured: enough for the distribution of any data set


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet task show gsm8k -n 3 --model Qwen/Qwen2.5-0.5B-Instruct"
    parser.add_argument("action", choices=["show", "play"], help="show problems, or answer them and see the rewards")
    parser.add_argument("task", help=TASKS)
    parser.add_argument("-n", type=int, default=3, help="problems to print (default 3); with 0, no tokenizer is loaded")
    parser.add_argument("--split", choices=["train", "test"], default="train", help="which problems (default train)")
    parser.add_argument("--model", help="whose tokenizer: a hub id or a folder (default: the preset's, or nano)")
    parser.add_argument("--preset", help="take model and settings from this preset")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    parser.add_argument("--style", help="the same as prompt.style=STYLE")
    parser.add_argument("--data-dir", help="the same as task.data_dir=FOLDER")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_overrides(parser, "task.path=my.jsonl")


def run(options: Namespace) -> None:
    if options.n < 0:
        raise ConfigError(f"-n {options.n}", "it is below 0", "Leave it out for 3")
    named = {"model.name": options.model or (None if options.preset else "nano"), "prompt.style": options.style}
    named |= {"task.name": options.task.removeprefix("task.name="), "task.data_dir": options.data_dir}
    config = resolve(options.preset, options.recipe, [*overrides_of(named), *options.overrides])
    downloads.find_all_data(config.task)
    if options.action == "play":
        play(with_every_component(config))
    else:
        show(config, options.split, options.n, as_json=options.json)


def show(config: Config, split: str, count: int, as_json: bool) -> None:
    """Print facts about the data, and then prompts. All bad records are counted before the first one is refused."""
    task = make_task(config.task.model_copy(update={"on_bad_record": "skip"}))
    training = training_problems(task, config.task, config.run.seed) if split == "train" else []
    held_out = evaluation_problems(task, len(task.test()))
    facts: dict[str, Any] = {"task": task.name, **({"train": len(training)} if training else {})}
    facts |= {"test": len(held_out), "notes": task.notes(), "data": datasheet.facts_of(task, [*training, *held_out])}
    style = task.prompt_style if config.prompt.style == "auto" else config.prompt.style
    if any(problem.messages for problem in [*training, *held_out]) and config.task.answer != "none":
        facts["notes"].append("conversations are asked as they are, so they have to say how the answer is marked")
    elif count and (config.model.name, task.name) == ("nano", "records") and style != "chat":
        facts["notes"].append(f"for the embedded model write prompt.style=chat; larger ones understand {style}, too")
    if not as_json:
        print("\n".join(datasheet.lines(facts)), flush=True)
    try:
        if facts["data"]["bad"] and config.task.on_bad_record == "error":
            make_task(config.task).train()  # raises
        problems = training or held_out
        gold_check.check(config, task, problems)
        facts |= _of_prompts(config, task, problems, count) if count else {}
    finally:  # the facts are printed even if the data are refused or the model is missing
        if as_json:
            print(json.dumps(facts, indent=2), flush=True)
    if count and not as_json:
        print("\n".join(_prompts(facts, split)))


def _of_prompts(config: Config, task: Task, problems: Sequence[Problem], count: int) -> dict[str, Any]:
    downloads.find_model(config.model)
    print(f"octet: loading the tokenizer of {config.model.name}", file=sys.stderr, flush=True)
    from trainer.model.load import load_tokenizer
    from trainer.run.data import prompter_of

    # silences a warning about long prompts: the lengths below report them
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    prompter = prompter_of(config, task, load_tokenizer(config.model))
    prompts = [prompter.prompt(problem) for problem in problems[:MEASURED]]
    facts: dict[str, Any] = {"prompt_style": prompter.style.name, "answer_style": prompter.answer_style}
    facts |= {"model": config.model.name, "stop_strings": [*prompter.stop_strings, *config.rollout.stop]}
    lengths, limit = [len(prompt.tokens) for prompt in prompts], config.prompt.max_tokens
    spread = {"min": min(lengths), "median": median(lengths), "max": max(lengths), "measured": len(lengths)}
    facts["prompt_tokens"] = {**spread, "limit": limit, "too_long": sum(length > limit for length in lengths)}
    facts["problems"] = [
        {"id": prompt.problem.id, "gold": prompt.problem.gold, "tokens": len(prompt.tokens), "text": prompt.text}
        for prompt in prompts[:count]
    ]
    return facts


def _prompts(facts: dict[str, Any], split: str) -> Iterator[str]:
    lengths = facts["prompt_tokens"]
    marked = f"; a strict answer is {ANSWERS[facts['answer_style']]}" if facts["data"]["answers"] else ""
    yield f"prompt style {facts['prompt_style']}{marked}"
    yield from (f"an answer ends at {json.dumps(string, ensure_ascii=False)}" for string in facts["stop_strings"])
    yield datasheet.wrapped(
        f"tokens of {lengths['measured']:,} {split} prompts for {facts['model']}: min {lengths['min']}, "
        f"median {lengths['median']:g}, max {lengths['max']}; "
        f"{lengths['too_long']} longer than prompt.max_tokens={lengths['limit']}"
    )
    for problem in facts["problems"]:
        yield f"\n--- {problem['id']}: {problem['tokens']} tokens, gold {problem['gold'] or '(none)'}"
        yield problem["text"]


def play(config: Config) -> None:
    """Ask problems until the input ends, and print the rewards of each answer."""
    task = make_task(config.task)
    scorer = make_scorer(config, task)
    problems = training_problems(task, config.task, config.run.seed)
    gold_check.check(config, task, problems)
    completions = typed(sys.stdin)
    print(f"Write what the model would write. The answer is {ANSWERS[scorer.rules.style]}.")
    print("An empty line ends your text, and Ctrl-D ends the game.")
    knows_tools = task.functions or config.task.calls == "template"
    environments = environments_of(task, config.task, "tools" if knows_tools else None)
    if environments:
        print("\n".join(calls(environments)))
    for problem in problems:
        completion = played(problem, completions, environments)
        if completion is None:
            return
        group = scorer.score(Prompt(problem, problem.question, ()), [completion])
        print("\n".join(verdict(problem, group.scores[0], scorer.weights)), flush=True)


def played(problem: Problem, texts: Iterator[str], environments: Environments | None) -> Completion | None:
    """Ask a problem and return the final answer with the environment's reward, or None at the end of the input."""
    environment, opening = environments.begin(problem) if environments else (None, None)
    print(f"\n{problem.id}: {opening or problem.question}\n", flush=True)
    reward = None
    try:
        for text in texts:
            reply, done, gained = "", True, None
            if environments and environment:
                reply, done, gained = environments.step(environment, problem, text)
                reward = (reward or 0.0) + gained
            if done:
                return Completion((), (), text, truncated=False, reward=reward)
            print(f"> {reply}\n", flush=True)
        return None
    finally:
        if environments:
            environments.close(environment)


def calls(environments: Environments) -> Iterator[str]:
    """Yield instructions for calling the tools, which a model gets from its chat template or its prompt."""
    if environments.schemas:
        yield 'To call a function, write <tool_call>{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}</tool_call>.'
    for function in (schema["function"] for schema in environments.schemas):
        yield f"{function['name']}({', '.join(function['parameters']['properties'])}): {function['description']}"
    if environments.request:
        yield environments.request


def typed(lines: Iterable[str]) -> Iterator[str]:
    """Yield the texts that a person types, each ended by an empty line or by the end of the input."""
    for is_written, text in groupby(lines, lambda line: bool(line.strip())):
        if is_written:
            yield "".join(text).rstrip("\n")


def verdict(problem: Problem, score: Score, weights: dict[str, float]) -> Iterator[str]:
    yield f"  {'gold':<12} {problem.gold!r}"
    strict, lenient = (score.strict, score.correct_strict), (score.lenient, score.correct_lenient)
    for name, (answer, is_right) in {"strict": strict, "lenient": lenient}.items():
        judged = "nothing found" if answer is None else f"{answer!r} is {'right' if is_right else 'wrong'}"
        yield f"  {name:<12} {judged}"
    for name, value in {**score.components, "reward": score.reward}.items():
        number = "    none" if value is None else f"{value:8.3f}"
        yield f"  {name:<12} {number}" + (f"  x {weights[name]:g}" if name in score.components else "")


ANSWERS = {
    "gsm8k": "the text after ####",
    "boxed": "the text in \\boxed{}",
    "tags": "the text between <answer> and </answer>",
    "letter": "the letter of a choice",
    "alone": "the whole text",
}
