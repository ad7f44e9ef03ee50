"""reward: a group of completions becomes a scored group."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.config import Reward
from trainer.rewards.components import COMPONENTS, read
from trainer.types import Completion, Prompt, Score, ScoredGroup


class Scorer:
    """The weighted sum of the named rewards. `style` is where a strict answer has to stand."""

    def __init__(self, settings: Reward, style: str) -> None:
        self.settings = settings
        self.style = style

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> ScoredGroup:
        return ScoredGroup(prompt, tuple(completions), tuple(self._score(prompt, one) for one in completions))

    def _score(self, prompt: Prompt, completion: Completion) -> Score:
        reading = read(prompt.problem, completion, self.style)
        values = {name: COMPONENTS[name](reading, self.settings) for name in self.settings.weights}
        reward = sum(weight * values[name] for name, weight in self.settings.weights.items())
        found = (reading.strict, reading.lenient, reading.correct_strict, reading.correct_lenient)
        return Score(reward, values, *found)
