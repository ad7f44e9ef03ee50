"""rollout: draw tokens, with random numbers that belong to an answer.

The random numbers depend only on the seed of the step, the problem and the number of the answer, not on the rank, on
other rows or on retries. So the answers are the same, up to rounding, for any number of ranks, and a lost answer is
the same when it is sampled again.
"""

import hashlib
import random

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.records import Prompt, Sampling

BLOCK = 128  # tokens per block of the vocabulary; most vocabulary sizes are multiples of it
TINY = 1e-30  # smallest share, above 0 so that no token of probability 0 is drawn
LARGE = 8192  # `_in_blocks` is faster for vocabularies of at least this size per answer in a row


def uniforms(sampling: Sampling, prompt: Prompt, number: int) -> list[float]:
    """Return a random number in [0, 1) for each token of an answer. Answers are numbered from 0 within their group."""
    rng = random.Random(f"{_name(sampling, prompt)}/{number}")
    return [rng.random() for _ in range(sampling.max_new_tokens)]


def group_seed(sampling: Sampling, prompt: Prompt, turn: str) -> int:
    """Return a seed for a group, or for a later turn of one answer. vLLM seeds the answers of a group with consecutive
    numbers from this one on, so the seeds of groups are far apart."""
    name = _name(sampling, prompt) + turn
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def draw(logits_BV: Tensor, temperature: float, uniform_BG: Tensor) -> tuple[Tensor, Tensor]:
    """Sample `G` tokens from each row (the most likely one at temperature 0). Return the tokens and their log-probs.

    Inverse transform sampling needs one random number per sampled token, not one per token of the vocabulary. Sums are
    in double precision, because a probability of 1e-7 would be rounded away in a sum near 1."""
    probabilities_BV = (logits_BV.float() / (temperature or 1.0)).softmax(dim=-1)
    if temperature == 0:
        tokens_BG = logits_BV.argmax(dim=-1, keepdim=True).expand(uniform_BG.shape)
    else:
        at = _in_blocks if logits_BV.shape[1] >= LARGE * uniform_BG.shape[1] else _at
        tokens_BG = at(probabilities_BV, 1 - uniform_BG)  # in (0, 1], so that no token of probability 0 is drawn
        tokens_BG.clamp_(0, logits_BV.shape[1] - 1)  # with NaN logits the position is beyond the vocabulary
    return tokens_BG, probabilities_BV.gather(-1, tokens_BG).log()


def _at(values_BV: Tensor, share_BG: Tensor) -> Tensor:
    """Return the position at which the running sum of each row reaches each share of its total."""
    summed_BV = values_BV.cumsum(dim=-1, dtype=torch.double)
    return torch.searchsorted(summed_BV, share_BG * summed_BV[:, -1:])


def _in_blocks(values_BV: Tensor, share_BG: Tensor) -> Tensor:
    """Return the same positions as `_at`, with a running sum only over the block in which a share is reached."""
    missing = -values_BV.shape[1] % BLOCK
    blocks_BNK = (F.pad(values_BV, (0, missing)) if missing else values_BV).unflatten(1, (-1, BLOCK))
    sums_BN = blocks_BNK.sum(dim=-1, dtype=torch.double)
    ends_BN = sums_BN.cumsum(dim=1)
    reached_BG = share_BG * ends_BN[:, -1:]
    block_BG = torch.searchsorted(ends_BN, reached_BG).clamp_(0, ends_BN.shape[1] - 1)
    beyond_BG = (ends_BN.gather(1, block_BG) - reached_BG) / sums_BN.gather(1, block_BG)
    within_BG = (1 - beyond_BG).clamp_(TINY, 1.0)
    summed_BGK = blocks_BNK.gather(1, block_BG[:, :, None].expand(-1, -1, BLOCK)).cumsum(dim=-1, dtype=torch.double)
    places_BG1 = torch.searchsorted(summed_BGK, within_BG[:, :, None] * summed_BGK[:, :, -1:])
    return block_BG * BLOCK + places_BG1[:, :, 0]


def _name(sampling: Sampling, prompt: Prompt) -> str:
    return f"{sampling.seed}/{prompt.problem.id}/{prompt.repeat}"
