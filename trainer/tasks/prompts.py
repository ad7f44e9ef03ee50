"""From a problem to the tokens that the model sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainer.config import PromptSettings
from trainer.errors import DataError
from trainer.tasks.base import Task
from trainer.types import Problem, Prompt

# What is asked besides the question. `chat` adds nothing: the model has to know the format already.
STYLES: dict[str, str] = {
    "chat": "{question}",
    "gsm8k": "{question}\n\nWork it out step by step. "
    "Then write the answer alone on a last line, after four hash marks, like this:\n#### 42",
}


class Prompter:
    """Asks questions in one style, through the chat template of the model if it has one."""

    def __init__(self, tokenizer: Any, settings: PromptSettings, task: Task) -> None:
        self.tokenizer = tokenizer
        self.max_tokens = settings.max_tokens
        self.style = task.prompt_style if settings.style == "auto" else settings.style

    def prompt(self, problem: Problem) -> Prompt:
        request = STYLES[self.style].format(question=problem.question)
        text, add_special_tokens = f"Question: {request}\nAnswer:", True
        if self.tokenizer.chat_template:
            messages = [{"role": "user", "content": request}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            add_special_tokens = False  # the template has written them
        return Prompt(problem, text, tuple(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]))

    def fitting(self, problems: Sequence[Problem]) -> list[Problem]:
        """The problems whose prompts are at most `prompt.max_tokens` long; an error when none is.

        A token is at least one byte, so only long texts have to be tokenized to know.
        """
        wrapping = len(self.prompt(Problem("", "", "")).tokens)
        kept = [
            problem
            for problem in problems
            if len(problem.question.encode()) + wrapping <= self.max_tokens
            or len(self.prompt(problem).tokens) <= self.max_tokens
        ]
        if not kept:
            raise DataError(f"prompt.max_tokens={self.max_tokens}: none of {len(problems)} prompts is that short.")
        return kept
