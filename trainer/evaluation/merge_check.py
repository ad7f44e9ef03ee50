"""Check by answers and log-probs that a merged model is the adapted model, up to rounding."""

from collections import Counter
from math import exp, inf, log1p
from statistics import fmean
from typing import NamedTuple

from trainer.errors import MergeError
from trainer.evaluation.evaluate import Evaluation
from trainer.records import Completion, Segment

Part = Completion | Segment

ALIKE = 0.99  # the share of the answers that rounding has to explain
# The largest mean difference of log-probs that rounding explains. In bf16 the mean is 0.02 for SmolLM2-135M, but the
# log-prob of a single token differs by up to 0.33, so answers may diverge where `LARGEST` times the limit explains it.
ROUNDING = {"fp32": 1e-3, "fp16": 0.01, "bf16": 0.05}
LARGEST = 10


class Agreement(NamedTuple):
    """How similar the answers of two models are, and the log-probs of the tokens that they share. `partings` has a
    number for each pair of answers that are not identical: the smallest difference between the models' log-probs that
    explains why they chose different tokens."""

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
    parts: list[tuple[Part, Part]] = []
    for a, b in pairs:
        others = _by_prompt(b)
        parts += [(part, others[prompt]) for prompt, part in _by_prompt(a).items() if prompt in others]
    # beyond the first different token the contexts differ
    differences = [abs(x - y) for a, b in parts for x, y in list(zip(a.logprobs, b.logprobs))[: _shared(a, b)]]
    return Agreement(
        sum(a.tokens == b.tokens for a, b in pairs),
        len(pairs),
        max(differences, default=0.0),
        fmean(differences or [0.0]),
        tuple(_parting(a, b) for a, b in parts if a.tokens != b.tokens),
    )


def _by_prompt(answer: Completion) -> dict[tuple[tuple[int, ...], int], Part]:
    """Return the answer, or its conversations by prompt, and number if they begin alike. An agent may have several at
    once, which end in any order, and may ask differently the next time."""
    seen = Counter[tuple[int, ...]]()
    parts: dict[tuple[tuple[int, ...], int], Part] = {}
    for part in answer.segments or (answer,):
        prompt = part.prompt if isinstance(part, Segment) else ()
        parts[prompt, seen[prompt]] = part
        seen[prompt] += 1
    return parts


def _parting(one: Part, other: Part) -> float:
    """Return the smallest difference d between the models' log-probs that explains the first different tokens. Each is
    the likeliest token of its model, with log-probs x and y. If the models differ by d, the first gives the other token
    at least y - d, which is at most x, because x is the likeliest, and at most the log-prob that x leaves for others.
    The same holds the other way round. Tokens that no model wrote, such as the reply of a tool, are not compared."""
    at = _shared(one, other)
    if not all(part.written[at] for part in (one, other) if at < len(part.written)):
        return 0.0
    both = zip(one.logprobs[at : at + 1], other.logprobs[at : at + 1])
    # inf if one answer is the beginning of the other
    return next((max(abs(x - y), y - _left(x), x - _left(y)) for x, y in both), inf)


def _left(logprob: float) -> float:
    """Return the log-prob of all other tokens together."""
    return log1p(-exp(logprob)) if logprob < 0 else -inf


def _shared(one: Part, other: Part) -> int:
    pairs = enumerate(zip(one.tokens, other.tokens))
    return next((at for at, (a, b) in pairs if a != b), min(len(one.tokens), len(other.tokens)))
