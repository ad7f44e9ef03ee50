"""Samplers whose answers a test has in its hand."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from trainer.records import Completion, Prompt, Sampling
from trainer.rollout.interface import Sampler


class Scripted(Sampler):
    """Writes what it is told to, and reports log-probs that are not those of the model."""

    def __init__(self, tokenizer: Any, text: Callable[[Prompt, int], str], truncated: bool = False) -> None:
        self.tokenizer, self.text, self.truncated = tokenizer, text, truncated

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        for index, prompt in enumerate(prompts):
            yield index, [self._answer(self.text(prompt, number)) for number in range(sampling.group)]

    def _answer(self, text: str) -> Completion:
        tokens = tuple(self.tokenizer(text)["input_ids"]) or (2,)
        return Completion(tokens, (-1.0,) * len(tokens), text, self.truncated)


class Altered(Sampler):
    """Passes the answers of another sampler on with what `alter` makes of them."""

    def __init__(self, sampler: Sampler, alter: Callable[[Completion], Completion]) -> None:
        self.sampler, self.alter = sampler, alter

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]:
        for index, group in self.sampler.sample(prompts, sampling):
            yield index, [self.alter(one) for one in group]
