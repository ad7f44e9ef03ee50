"""Find the program in an answer."""

from __future__ import annotations

import re

from trainer.answers.strip_thinking import after_thinking

_FENCED = re.compile(r"```[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def fenced(text: str) -> str | None:
    """Return the last fenced block of what is said after thinking, or None if there is none."""
    blocks: list[str] = _FENCED.findall(after_thinking(text)[1])
    return blocks[-1] if blocks else None


def program(text: str) -> str:
    """Return the last fenced block, or all that is said after thinking."""
    block = fenced(text)
    return after_thinking(text)[1] if block is None else block
