"""rollout: draw tokens, with random numbers that belong to an answer.

They follow from the seed of the step, the problem and the number of the answer. They do not depend on the rank, on the
rows beside the answer, or on a retry, so any number of ranks samples the same answers up to rounding, and an answer
that was lost is the same when it is sampled again.
"""

import hashlib
import random

import torch
from torch import Tensor

from trainer.records import Prompt, Sampling


def uniforms(sampling: Sampling, prompt: Prompt, number: int) -> list[float]:
    """Return a random number in [0, 1) for each token of an answer. Answers are numbered from 0 within their group."""
    rng = random.Random(f"{_name(sampling, prompt)}/{number}")
    return [rng.random() for _ in range(sampling.max_new_tokens)]


def group_seed(sampling: Sampling, prompt: Prompt, turn: str = "") -> int:
    """Return a seed for a group, far from the others: vLLM seeds the answers of a group with this and the next ones.
    A later turn of an answer has a name, and a seed of its own."""
    name = _name(sampling, prompt) + turn
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def draw(logits_BV: Tensor, temperature: float, uniform_BG: Tensor) -> tuple[Tensor, Tensor]:
    """Sample `G` tokens from each row (the most likely one at temperature 0). Return the tokens and their log-probs.
    Inverse transform sampling needs one random number a token, not one for each token of the vocabulary. It is done in
    double precision, because a token of probability 1e-7 would be lost in the rounding of a sum near 1."""
    probabilities_BV = (logits_BV.float() / (temperature or 1.0)).softmax(dim=-1)
    if temperature == 0:
        tokens_BG = logits_BV.argmax(dim=-1, keepdim=True).expand(uniform_BG.shape)
    else:
        summed_BV = probabilities_BV.cumsum(dim=-1, dtype=torch.double)
        # in (0, sum], so that a token of probability 0 is never drawn
        tokens_BG = torch.searchsorted(summed_BV, (1 - uniform_BG) * summed_BV[:, -1:])
        tokens_BG.clamp_(max=logits_BV.shape[1] - 1)  # for NaN logits, which have no position
    return tokens_BG, probabilities_BV.gather(-1, tokens_BG).log()


def _name(sampling: Sampling, prompt: Prompt) -> str:
    return f"{sampling.seed}/{prompt.problem.id}/{prompt.repeat}"
