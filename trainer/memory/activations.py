"""What a pass through the layers holds: bytes that autograd keeps, and bytes that are there for a moment.

Counted as transformers computes a block of the Llama kind under `loss/shared_prefix.py`, and as `logprobs.py` goes
through the output layer. The kernels of attention (flash, memory-efficient) keep no scores of token by token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from trainer.model.shapes import Shape

CHUNK = 64 * 2**20  # as in logprobs.py, which imports torch: bytes of fp32 logits at once
FLOAT = 4  # norms, logits and sums of attention are in fp32, whatever the model is in


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch: what goes through the layers, and how it stands in rows inside the attention."""

    tokens: float  # through the layers
    edges: float  # completion tokens, through the output layer
    prompt_places: float  # of the attention's rows of prompts
    answer_places: float  # of its rows of answers
    key_places: float  # that these answers look at
    pairs: float  # of a token and a key, that a mask speaks of
    is_flat: bool = True
    keeps_scores: bool = False  # eager attention: of each token with each key

    @classmethod
    def flat(cls, budget: int, most: int, group: int, prompt: int, completion: int) -> Work:
        """As many answers of full length as `Packer` puts together; a part of one where lengths would allow it."""
        row = prompt + completion
        answer = completion + row // 8
        groups, rest = divmod(budget, prompt + group * answer)
        rows = min(most, max(1.0, groups * group + max(0.0, (rest - prompt) / answer)))
        return cls.of_rows(rows, ceil(rows / group), prompt, completion)

    @classmethod
    def of_rows(cls, rows: float, prompts: float, prompt: int, completion: int) -> Work:
        """The last token of an answer is only a target."""
        inputs = completion - 1
        keys = rows * (prompt + inputs)
        places = prompts * prompt + rows * inputs
        return cls(places, rows * completion, prompts * prompt, rows * inputs, keys, keys * inputs)

    @classmethod
    def padded(cls, rows: float, prompt: int, completion: int, keeps_scores: bool = False) -> Work:
        width = prompt + max(completion - 1, 0)
        places = rows * width
        return cls(places, rows * completion, 0, places, places, places * width, False, keeps_scores)


def attention_saves(shape: Shape, work: Work, item: int) -> float:
    """Queries, keys, values and what was found, as rows. Answers have a mask, so the heads that share keys get them
    each for its own."""
    sums = FLOAT * shape.heads * (work.prompt_places + work.answer_places)
    if work.is_flat:
        prompts = work.prompt_places * 2 * (shape.queries + shape.keys)
        answers = (work.answer_places + work.key_places) * 2 * shape.queries
        return (prompts + answers + work.pairs) * item + sums
    if work.keeps_scores:  # before and behind a cap, where there is one, and the softmax in fp32 and as it is used
        return work.tokens * 4 * shape.queries * item + work.pairs * shape.heads * (FLOAT + 2 * item)
    keys = shape.queries if shape.windowed else shape.keys
    return work.tokens * 2 * (shape.queries + keys) * item + sums


def saved_bytes(shape: Shape, work: Work, item: int, learning: Collection[str]) -> float:
    """What one layer keeps for the backward pass. `learning` are the linear layers that need their input."""
    norms = shape.block_norms * FLOAT * shape.hidden
    if shape.head_norms:
        norms += FLOAT * (shape.queries + shape.keys)
    inputs = 0
    if any(name in learning for name in ("q_proj", "k_proj", "v_proj")):
        inputs += shape.hidden
    if "o_proj" in learning:
        inputs += shape.queries
    if any(name in learning for name in ("gate_proj", "up_proj")):
        inputs += shape.hidden
    if "down_proj" in learning:
        inputs += shape.intermediate
    if "norms" in learning:
        inputs += shape.block_norms * shape.hidden
    mlp = 3 * shape.intermediate
    return work.tokens * (norms + (inputs + mlp) * item) + attention_saves(shape, work, item)


def layer_bytes(shape: Shape, work: Work, item: int, learning: Collection[str]) -> float:
    """For a moment on the way back through a layer: the gradients inside its feed-forward part, or of its keys."""
    mlp = work.tokens * (3 * shape.intermediate + 2 * shape.hidden) * item
    freed = work.tokens * 3 * shape.intermediate * item
    attention = (2 * work.key_places + 2 * work.answer_places) * shape.queries * item - freed
    return max(mlp, attention)


def kept_bytes(shape: Shape, work: Work, item: int) -> float:
    """Behind the last layer: its norm, the hidden states of completion tokens, and their gradients."""
    return work.tokens * FLOAT * shape.hidden + work.edges * 2 * shape.hidden * item


def forward_bytes(shape: Shape, work: Work, item: int, targets: Collection[str]) -> float:
    """Without gradients only one layer holds anything: hidden states and its feed-forward part, or its attention."""
    adapters = 2 * shape.intermediate if any(name in targets for name in ("gate_proj", "up_proj")) else 0
    mlp = work.tokens * (3 * shape.intermediate + 3 * shape.hidden + adapters) * item
    attention = attention_saves(shape, work, item) + work.tokens * 2 * shape.hidden * item
    return max(mlp, attention)


def head_bytes(shape: Shape, edges: float, item: int, trains: bool, learns: bool, wants_entropy: bool) -> float:
    """A chunk of logits with its probabilities and a product of the two; where the output layer learns, the gradient
    of the whole layer as well."""
    logits = FLOAT * shape.vocabulary * min(edges, max(1, CHUNK // (FLOAT * shape.vocabulary)))
    copies = 3 + shape.capped + wants_entropy
    return copies * logits + (shape.embedding * item + 2 * logits if learns else 0)
