"""The bytes of a pass through the layers: those that autograd saves, and temporary ones.

They are counted as transformers computes a Llama block under `loss/shared_prefix.py`, and as `loss/logprobs.py`
computes the output layer. Flash and memory-efficient attention save no scores for pairs of tokens.
"""

from collections.abc import Collection
from math import ceil
from typing import NamedTuple

from trainer.model.shapes import CHUNK_BYTES, Block, Shape

GATES = ("gate_proj", "up_proj", "gate_up_proj", "input_linear", "w1", "w3")
FLOAT = 4  # bytes of norms, logits and sums of attention, which are in fp32 whatever the model's precision


class Work(NamedTuple):
    """The sizes of a micro-batch: its tokens, and the rows in which the attention lays them out."""

    tokens: float  # tokens that go through the layers
    edges: float  # completion tokens, which go through the output layer
    prompt_places: float  # places in the attention's rows of prompts
    answer_places: float  # places in its rows of answers
    key_places: float  # keys that these answers attend to
    pairs: float  # pairs of a token and a key in a mask
    is_flat: bool = True
    keeps_scores: bool = False  # True for eager attention, which saves a score for each pair

    @classmethod
    def flat(cls, budget: int, most: int, group: int, prompt: int, completion: int) -> "Work":
        """Return the work of the answers of full length that `Packer` packs together, a fraction of one included."""
        row = prompt + completion
        answer = completion + row // 8
        groups, rest = divmod(budget, prompt + group * answer)
        rows = min(most, max(1.0, groups * group + max(0.0, (rest - prompt) / answer)))
        inputs, prompts = completion - 1, ceil(rows / group) * prompt  # the last token of an answer is only a target
        keys = rows * (prompt + inputs)
        return cls(prompts + rows * inputs, rows * completion, prompts, rows * inputs, keys, keys * inputs)

    @classmethod
    def padded(cls, rows: float, prompt: int, completion: int, keeps_scores: bool = False) -> "Work":
        width = prompt + max(completion - 1, 0)
        places = rows * width
        return cls(places, rows * completion, 0, places, places, places * width, False, keeps_scores)


def attention_saves(shape: Shape, block: Block, work: Work, item: int) -> float:
    """Return the bytes of queries, keys (copied for the heads that share them), values and output."""
    if not block.queries:
        return (work.prompt_places + work.answer_places) * (block.mixed * item + block.mixing)
    sums = FLOAT * shape.heads * (work.prompt_places + work.answer_places)
    keys = block.queries if shape.windowed else block.keys  # a window needs a mask
    if work.is_flat:
        prompts = work.prompt_places * 2 * (block.queries + keys)
        answers = (work.answer_places + work.key_places) * 2 * block.queries
        return (prompts + answers + work.pairs) * item + sums
    if work.keeps_scores:  # before and after a cap, and after the softmax in fp32 and in the model's precision
        scores = item if shape.family.mixture == "gpt_oss" else FLOAT + 2 * item
        return work.tokens * 4 * block.queries * item + work.pairs * shape.heads * scores
    return work.tokens * 2 * (block.queries + keys) * item + sums


def saved_bytes(shape: Shape, block: Block, work: Work, item: int, learning: Collection[str]) -> float:
    """Return the bytes that one block saves for the backward pass. The layers in `learning` save their input."""
    norms = shape.family.block_norms * FLOAT * shape.hidden
    if shape.family.query_norms != "none":
        norms += FLOAT * (block.queries + block.keys)
    inputs = sum(part[0].inputs for part in block.projections if any(linear.name in learning for linear in part))
    if "norms" in learning:
        inputs += shape.family.block_norms * shape.hidden
    return work.tokens * (norms + (inputs + block.mlp) * item) + attention_saves(shape, block, work, item)


def layer_bytes(shape: Shape, block: Block, work: Work, item: int) -> float:
    """Return the temporary bytes of gradients in a block: of its feed-forward part, or of its attention."""
    mlp = work.tokens * (block.mlp + 2 * shape.hidden) * item
    freed = work.tokens * block.mlp * item
    attention = (2 * work.key_places + 2 * work.answer_places) * block.queries * item - freed
    return max(mlp, attention + _beside_sinks(shape, work, item))


def _beside_sinks(shape: Shape, work: Work, item: int) -> float:
    """Return the temporary bytes of the scores of gpt-oss: scaled, masked, with sinks, shifted."""
    return 5 * work.pairs * shape.heads * item if shape.family.mixture == "gpt_oss" else 0


def kept_bytes(shape: Shape, work: Work, item: int) -> float:
    """Return the bytes kept after the last layer: its norm, hidden states of completion tokens, and their gradients."""
    return work.tokens * FLOAT * shape.hidden + work.edges * 2 * shape.hidden * item


def forward_bytes(shape: Shape, work: Work, item: int, targets: Collection[str]) -> float:
    """Return the peak of a pass without gradients: inside the feed-forward part of a block, or its attention."""
    peaks = []
    for block in shape.blocks:
        gates = [linear for linear in block.linears if linear.name in GATES]
        adapters = sum(gate.outputs for gate in gates) if any(gate.name in targets for gate in gates) else 0
        peaks.append(work.tokens * (block.mlp + (3 + block.chosen) * shape.hidden + adapters) * item)
        if shape.family.mixture == "gpt_oss":  # its gate needs 1.5 times the saved bytes, in addition to scores
            width = 1.5 * block.mlp + (4 - block.chosen / 2) * shape.hidden  # inputs are gathered once
            peaks.append((work.tokens * width + work.pairs * shape.heads) * item)
        attention = attention_saves(shape, block, work, item) + work.tokens * 2 * shape.hidden * item
        peaks.append(attention + _beside_sinks(shape, work, item))
    return max(peaks)


def head_bytes(shape: Shape, edges: float, learns: bool, wants_entropy: bool) -> float:
    """Return the bytes of a chunk of logits, its probabilities and their product, and of gradients if it learns."""
    logits = FLOAT * shape.vocabulary * min(edges, max(1, CHUNK_BYTES // (FLOAT * shape.vocabulary)))
    return (3 + shape.family.is_capped + wants_entropy + 2 * learns) * logits
