"""`octet task show`: show what a task holds, and the exact text that a model would see with its number of tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from statistics import median
from typing import Any

from trainer.config.settings import Config
from trainer.problem.prompts import Prompter
from trainer.problem.task import Task, evaluation_problems, make_task, notes, training_problems
from trainer.records import Problem, Prompt

MEASURED = 10_000  # prompts whose length is measured: enough for the distribution of any data set


def show(config: Config, split: str, count: int, as_json: bool) -> None:
    task = make_task(config.task)
    problems = _problems(task, config, split)  # raises an error for bad data before a tokenizer loads
    facts: dict[str, Any] = {"task": task.name, **_sizes(task, config, split, len(problems)), "notes": notes(task)}

    from trainer.model.load import load_tokenizer

    # silences the warning about long prompts, which the lengths below report
    logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)
    prompter = Prompter(load_tokenizer(config.model), config.prompt, task)
    prompts = [prompter.prompt(problem) for problem in problems[:MEASURED]]
    facts |= {"prompt_style": prompter.style, "answer_style": prompter.answer_style, "model": config.model.name}
    facts["prompt_tokens"] = _lengths(prompts, config.prompt.max_tokens)
    facts["problems"] = [_facts_of(prompt) for prompt in prompts[:count]]
    print(json.dumps(facts, indent=2, ensure_ascii=False) if as_json else _as_text(facts, split))


def _problems(task: Task, config: Config, split: str) -> list[Problem]:
    if split == "test":
        return evaluation_problems(task, len(task.test()))
    return training_problems(task, config.task, config.run.seed)


def _sizes(task: Task, config: Config, split: str, count: int) -> dict[str, int]:
    if split == "test":  # the training set may be missing
        return {"test": count}
    return {"train": count, "test": len(task.test())}


def _lengths(prompts: Sequence[Prompt], limit: int) -> dict[str, Any]:
    lengths = [len(prompt.tokens) for prompt in prompts]
    too_long = sum(length > limit for length in lengths)
    spread = {"min": min(lengths), "median": median(lengths), "max": max(lengths)}
    return {**spread, "measured": len(lengths), "limit": limit, "too_long": too_long}


def _facts_of(prompt: Prompt) -> dict[str, Any]:
    problem = prompt.problem
    return {"id": problem.id, "gold": problem.gold, "tokens": len(prompt.tokens), "text": prompt.text}


def _as_text(facts: dict[str, Any], split: str) -> str:
    lengths = facts["prompt_tokens"]
    sizes = ", ".join(f"{facts[name]:,} {what}" for name, what in SIZES.items() if name in facts)
    lines = [
        f"{facts['task']}: {sizes}",
        *(f"data: {note}" for note in facts["notes"]),
        f"prompt style {facts['prompt_style']}; a strict answer is {ANSWERS[facts['answer_style']]}",
        f"tokens of {lengths['measured']:,} {split} prompts for {facts['model']}: min {lengths['min']}, "
        f"median {lengths['median']:g}, max {lengths['max']}; "
        f"{lengths['too_long']} longer than prompt.max_tokens={lengths['limit']}",
    ]
    for problem in facts["problems"]:
        lines += ["", f"--- {problem['id']}: {problem['tokens']} tokens, gold {problem['gold'] or '(none)'}"]
        lines += [problem["text"]]
    return "\n".join(lines)


SIZES = {"train": "training problems", "test": "held-out problems"}
ANSWERS = {
    "gsm8k": "what stands after ####",
    "boxed": "what stands in \\boxed{}",
    "tags": "what stands between <answer> and </answer>",
    "letter": "the letter of a choice",
}
