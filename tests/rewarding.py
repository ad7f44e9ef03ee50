"""What the tests of rewards share: a scorer from settings, and answers to score."""

from pathlib import Path

from trainer.config.resolve import resolve
from trainer.problem.task import Task
from trainer.records import Completion, Problem, Prompt, Score
from trainer.reward.make import make_scorer
from trainer.reward.scorer import Scorer


class MadeUp(Task):
    """A task without problems, with other attributes where a test gives them."""

    name, prompt_style, answer_style = "made up", "chat", "gsm8k"

    def __init__(self, **attributes: object) -> None:
        vars(self).update(attributes)

    def train(self) -> list[Problem]:
        return []

    test = train


TASK = MadeUp()
PROBLEM = Problem("p/7", "What is 3 * 4?", "12", "3 * 4 = 12\n#### 12", {"level": "easy"})
PROMPT = Prompt(PROBLEM, "Question: What is 3 * 4?", (1, 2))


def scorer_of(*overrides: str, task: Task = TASK, folder: Path | None = None) -> Scorer:
    return make_scorer(resolve(None, None, overrides), task, folder)


def answer(text: str, tokens: int = 3) -> Completion:
    return Completion(tuple(range(tokens)), (-0.5,) * tokens, text, truncated=False)


def scores_of(scorer: Scorer, *texts: str) -> tuple[Score, ...]:
    return scorer.score(PROMPT, [answer(text) for text in texts]).scores
