"""Worked solutions as rows to train on: the prompt as in every run, and the answer that it asks for.

The answer is the solution, with its result where a strict answer has to stand, and the token at which answers end:

    3 * 4 = 12            gsm8k       boxed       tags                       r1_zero
    12 - 5 = 7            #### 7      \\boxed{7}   <answer>7</answer>         </think>, then <answer>7</answer>

`run/teaching.py` makes the rows. Only the tokens of the answer are trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trainer.answers import find
from trainer.errors import DataError
from trainer.problem.prompts import MARKS, Prompter
from trainer.problem.task import Task
from trainer.records import Problem

_MARKED = re.compile(r"\n?[ \t]*####[^\n]*|</?answer>")


def taught(problem: Problem, style: str, in_thought: bool = False) -> str:
    """Return the answer that a solution teaches. With `in_thought` the prompt has opened a thought, which the solution
    closes. A solution without a gold answer is taught as it is."""
    if not problem.gold:
        return problem.solution
    if not in_thought and find.strict(problem.solution, style, problem.gold) is not None:
        return problem.solution
    work, mark = _MARKED.sub("", problem.solution).strip(), MARKS[style].format(problem.gold)
    return "\n".join([work, find.THOUGHT_END, mark] if in_thought else [work, mark])


def check(task: Task, problems: Sequence[Problem]) -> None:
    """Raise DataError if there is no worked solution to teach."""
    if not any(problem.solution for problem in problems):
        reason = f"none of its {len(problems)} training problems has a worked solution, which a warm-up teaches"
        remedy = "Name their column: task.solution=COLUMN. Without one, write warmup.steps=0"
        raise DataError(f"task.name={task.name}", reason, remedy)


def end_token(prompter: Prompter, stop_tokens: Sequence[int]) -> int:
    """Return the token that ends an answer: the one with which the chat template closes a turn of the assistant."""
    tokenizer: Any = prompter.tokenizer
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        text = tokenizer.apply_chat_template(turns, tokenize=False, **prompter.settings.template)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        if closing := [token for token in tokens if token in stop_tokens][-1:]:
            return int(closing[0])
    return int(tokenizer.eos_token_id)
