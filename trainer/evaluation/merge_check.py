"""Check that two models are the same up to rounding, as a merged model is: by their answers and log-probs."""

from collections import Counter
from dataclasses import dataclass
from math import exp, inf, log1p
from statistics import fmean

from trainer.errors import MergeError
from trainer.evaluation.evaluate import Evaluation
from trainer.records import Completion, Segment

Part = Completion | Segment

ALIKE = 0.99  # share of the answers of a merged model that have to be those of the adapted one
# The mean difference of a log-prob that merging may make by rounding. In bf16 it is 0.02 for SmolLM2-135M, where the
# log-prob of a single token differs by up to 0.33; so an answer may part from the other where `LARGEST` times the mean
# explains it.
ROUNDING = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.05}
LARGEST = 10


@dataclass(frozen=True, slots=True)
class Agreement:
    """How similar the answers of two models are: identical ones, and the log-probs of the tokens they share. `partings`
    has a number for each pair of answers that are not identical: the smallest difference between the models' log-probs
    with which they can choose different tokens there."""

    identical: int
    problems: int
    largest_difference: float
    mean_difference: float
    partings: tuple[float, ...]

    def __str__(self) -> str:
        return (
            f"{self.identical} of {self.problems} greedy answers identical, "
            f"log-probs within {self.largest_difference:.1e} where the tokens agree"
        )

    def must_be_rounding(self, dtype: str) -> None:
        """Raise MergeError if the models differ by more than the rounding of this precision."""
        rounding = ROUNDING[dtype]
        unlike = sum(not parting <= LARGEST * rounding for parting in self.partings)
        if unlike > (1 - ALIKE) * self.problems or not self.mean_difference <= rounding:
            raise MergeError(
                f"the merged model is not the one that was trained: {unlike} of {self.problems} greedy answers differ, "
                f"and log-probs by {self.mean_difference:.1e} on average; rounding to {dtype} explains up to "
                f"{rounding:g}. Use the adapter without merging it, and report lora.targets and the model."
            ).of_all()


def agreement(one: Evaluation, other: Evaluation) -> Agreement:
    pairs = [(a.completion, b.completion) for a, b in zip(one.outcomes, other.outcomes, strict=True)]
    alike = [found for pair in pairs for found in _of_one_prompt(*pair)]
    differences = [apart for a, b in alike for apart in _differences(a, b)]
    return Agreement(
        sum(a.tokens == b.tokens for a, b in pairs),
        len(pairs),
        max(differences, default=0.0),
        fmean(differences or [0.0]),
        tuple(_parting(a, b) for a, b in alike if a.tokens != b.tokens),
    )


def _of_one_prompt(one: Completion, other: Completion) -> list[tuple[Part, Part]]:
    """Return what answers the same prompt: two answers, or those of their conversations that begin alike. An agent may
    hold several at once, which end in any order, and may ask something else the next time."""
    parts, others = _by_prompt(one), _by_prompt(other)
    return [(part, others[prompt]) for prompt, part in parts.items() if prompt in others]


def _by_prompt(answer: Completion) -> dict[tuple[tuple[int, ...], int], Part]:
    seen = Counter[tuple[int, ...]]()
    found: dict[tuple[tuple[int, ...], int], Part] = {}
    for part in answer.segments or (answer,):
        prompt = part.prompt if isinstance(part, Segment) else ()
        found[prompt, seen[prompt]] = part
        seen[prompt] += 1
    return found


def _differences(one: Part, other: Part) -> list[float]:
    """Return the differences of log-probs before the first different token, after which the contexts differ."""
    both = list(zip(one.logprobs, other.logprobs))
    return [abs(x - y) for x, y in both[: _shared(one, other)]]


def _parting(one: Part, other: Part) -> float:
    """Return the smallest difference d between the models' log-probs with which the first different tokens differ. Each
    is the likeliest token of its model, with log-probs x and y. The first model gives the other token y - d or more.
    That is at most x, because x is the likeliest, and at most what x leaves. The same holds the other way round. What
    no model has written, such as the reply of a tool, says nothing about the models."""
    at = _shared(one, other)
    if not all(part.written[at] for part in (one, other) if at < len(part.written)):
        return 0.0
    both = zip(one.logprobs[at : at + 1], other.logprobs[at : at + 1])
    # inf: one answer is the beginning of the other
    return next((max(abs(x - y), y - _left(x), x - _left(y)) for x, y in both), inf)


def _left(logprob: float) -> float:
    """Return the log-prob of everything else."""
    return log1p(-exp(logprob)) if logprob < 0 else -inf


def _shared(one: Part, other: Part) -> int:
    pairs = enumerate(zip(one.tokens, other.tokens))
    return next((at for at, (a, b) in pairs if a != b), min(len(one.tokens), len(other.tokens)))
