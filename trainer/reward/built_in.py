"""The built-in rewards. Each is a function from the reading of a completion to a number, at most 1.0.

`overlong` and `repetition` are penalties: 0.0 at best, -1.0 at worst. To add a reward, write a function and name it in
`COMPONENTS` and in `REWARDS` of `trainer/config/sections/reward.py`; then `reward.weights` accepts it.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

from trainer.answers import compare, find
from trainer.answers.number import with_points
from trainer.answers.strip_thinking import THOUGHTS
from trainer.config.settings import Reward
from trainer.errors import ConfigError
from trainer.problem.task import Task
from trainer.records import Completion, DeadBy, Problem, Prompt


@dataclass(frozen=True, slots=True)
class Rules:
    """What the rewards depend on. `style` says where a strict answer has to stand, `opened` whether prompts open a
    thought."""

    settings: Reward
    style: str
    max_new_tokens: int
    opened: bool = False
    dead_by: DeadBy = "reward"
    pays_right: bool = False
    task: Task | None = None  # it may find and score answers in its own way

    def own(self, method: str, problem: Problem) -> Callable[..., Any] | None:
        """Return the method `read` or `score` of the task that a problem comes from, or None if it has none."""
        return getattr(self.task.part(problem), method) if self.task else None

    @property
    def overlong_buffer(self) -> int:
        """Return over how many tokens `overlong` falls from 0 to -1. DAPO uses 4,096 of 20,480."""
        buffer = self.settings.overlong_buffer or max(1, self.max_new_tokens // 5)
        if buffer > self.max_new_tokens:
            reason = f"it is longer than rollout.max_new_tokens={self.max_new_tokens}"
            raise ConfigError(f"reward.overlong_buffer={buffer}", reason, f"Try {max(1, self.max_new_tokens // 5)}")
        return buffer


@dataclass(frozen=True, slots=True)
class Reading:
    """A completion with its answers: `strict` from the place that the prompt asks for, `lenient` from anywhere."""

    prompt: Prompt
    completion: Completion
    strict: str | None
    lenient: str | None
    strict_score: float
    lenient_score: float

    @property
    def correct_strict(self) -> bool:
        return self.strict_score >= 1.0

    @property
    def correct_lenient(self) -> bool:
        return self.lenient_score >= 1.0

    @property
    def problem(self) -> Problem:
        return self.prompt.problem


def read(
    prompt: Prompt, completion: Completion, rules: Rules, equal: Callable[[str, str], bool] = compare.equal
) -> Reading:
    """Find the answers in a completion. The task scores them, or they are compared with the gold answer."""
    problem, style, texts = prompt.problem, rules.style, [completion.text]
    gold = problem.gold.upper() if style == "letter" and len(problem.gold) == 1 else problem.gold
    own_read, own_score = (rules.own(method, problem) for method in ("read", "score"))
    has_comma = not own_score and rules.task is not None and rules.task.part(problem).decimal == "comma"
    if has_comma and not own_read:
        texts.append(with_points(completion.text))  # a model may write either form
    opened = opens_thought(prompt, rules)
    plain = compare.without_accents if rules.settings.ignore_accents else str

    @cache
    def score(answer: str | None) -> float:
        if answer is None:
            return 0.0
        if own_score:
            return float(own_score(problem, answer))
        forms = [answer, with_points(answer)] if own_read and has_comma else [answer]
        return float(any(equal(plain(form), plain(gold)) for form in forms))

    def found(look: Callable[[str], str | None]) -> tuple[str | None, float]:
        """Return the answer in the first text with a right one, or else in the first text, and its score."""
        answers = [(answer, score(answer)) for answer in map(look, texts)]
        return next((one for one in answers if one[1] >= 1.0), answers[0])

    if own_read:
        strict = lenient = found(lambda text: own_read(problem, text))
    else:
        strict = lenient = found(lambda text: find.strict(text, style, gold, opened))
        if strict[1] < 1.0:  # an answer that is correct in the strict place is also correct in the lenient reading
            lenient = found(lambda text: find.lenient(text, gold))
    return Reading(prompt, completion, strict[0], lenient[0], strict[1], lenient[1])


def correct(reading: Reading, rules: Rules) -> float:
    return reading.strict_score if rules.settings.answer == "strict" else reading.lenient_score


def length(reading: Reading, rules: Rules) -> float:
    shortest, longest = rules.settings.length_band
    return float(shortest <= len(reading.completion.text) <= longest)


def overlong(reading: Reading, rules: Rules) -> float | None:
    """Return DAPO's soft penalty (Yu et al. 2025, equation 13), or None if the number of tokens is unknown."""
    replies = [sum(own) for segment in reading.completion.segments for _, own in groupby(segment.written)]
    # an agent has a limit for each reply, and other answers for all tokens, with those of an environment
    tokens = max(replies, default=len(reading.completion.tokens))
    if not tokens and reading.completion.text:
        return None
    return max(-1.0, min(0.0, (rules.max_new_tokens - tokens) / rules.overlong_buffer - 1))


def repetition(reading: Reading, rules: Rules) -> float:
    """Return minus the share of the phrases of `repetition_words` words that have occurred before."""
    words, size = reading.completion.text.lower().split(), rules.settings.repetition_words
    phrases = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return len(set(phrases)) / len(phrases) - 1.0 if phrases else 0.0


_OPEN, _CLOSE = find.THOUGHT, find.THOUGHT_END
_THINKS = re.compile(rf"\s*{_OPEN}(?P<thought>.*?){_CLOSE}(?P<answer>.*)", re.DOTALL)


def opens_thought(prompt: Prompt, rules: Rules) -> bool:
    """Return True if a prompt ends with an opened thought: by its text, or by the style, without which conversations
    from a data set are passed on."""
    return prompt.text.rstrip().endswith(tuple(THOUGHTS)) or (rules.opened and not prompt.problem.messages)


def think_tags(reading: Reading, rules: Rules) -> float:
    """Return 1 for one thought in tags at the start and an answer after it. The prompt may have opened the thought."""
    text = reading.completion.text
    if opens_thought(reading.prompt, rules):
        text = _OPEN + text
    match = _THINKS.fullmatch(text)
    once = text.count(_OPEN) == text.count(_CLOSE) == 1
    return float(once and match is not None and all(part.strip() for part in match.groups()))


COMPONENTS: dict[str, Callable[[Reading, Rules], float | None]] = {
    "correct": correct,
    "format": lambda reading, rules: float(reading.strict is not None),
    "length": length,
    "overlong": overlong,
    "repetition": repetition,
    "think_tags": think_tags,
    "environment": lambda reading, rules: reading.completion.reward,  # None without one
}
