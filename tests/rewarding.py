"""What the tests of rewards share: a scorer from settings, and answers to score."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from trainer.config.command_line import resolve
from trainer.records import Completion, Problem, Prompt, Score
from trainer.reward.make import make_scorer
from trainer.reward.scorer import Scorer

TASK = SimpleNamespace(name="made up", prompt_style="chat", answer_style="gsm8k")
PROBLEM = Problem("p/7", "What is 3 * 4?", "12", "3 * 4 = 12\n#### 12", {"level": "easy"})
PROMPT = Prompt(PROBLEM, "Question: What is 3 * 4?", (1, 2))


def scorer_of(*overrides: str, task: object = TASK, folder: Path | None = None) -> Scorer:
    return make_scorer(resolve(None, None, overrides), task, folder)  # type: ignore[arg-type]


def answer(text: str, tokens: int = 3) -> Completion:
    return Completion(tuple(range(tokens)), (-0.5,) * tokens, text, truncated=False)


def scores_of(scorer: Scorer, *texts: str) -> tuple[Score, ...]:
    return scorer.score(PROMPT, [answer(text) for text in texts]).scores
