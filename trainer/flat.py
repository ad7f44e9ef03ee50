"""loss: each token goes through the layers once. A prompt stands there once for all its answers, and padding nowhere.

Only attention mixes positions, so only there tokens have to stand in rows. Everything else, which is nearly all of the
work, sees one line of tokens: prompts first, then answers.

    rows    5 6 7 8 .    5 6 9 . .    4 3 2 1 8        three answers, the first two to the prompt 5 6
    line    5 6 4 3 2 7 8 9 1 8                        10 tokens for 15 places

The attention function below lays queries, keys and values out, once as prompts and once as answers that look back at
their prompt, calls the model's own attention, and puts the result back into the line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from trainer.types import TrainingBatch

PREFIX = "octet_flat_"
BELOW = ("sdpa",)


class Layout(NamedTuple):
    """Where tokens stand in the line: P prompts of up to T tokens, B answers of up to C. Padding points anywhere."""

    prompts_PT: Tensor
    answers_BC: Tensor
    keys_BK: Tensor  # what an answer looks at: its prompt, then itself
    mask_BCK: Tensor  # bool: this query may see this key
    kept_N: Tensor  # which places of all prompts, then of all answers, hold a token
    positions_N: Tensor
    index_BT: Tensor  # of each place of the batch

    def rows(self, line_1HND: Tensor, index: Tensor) -> Tensor:
        return line_1HND[0].transpose(0, 1)[index].transpose(1, 2)

    def line(self, *rows: Tensor) -> Tensor:
        return torch.cat([part.flatten(0, 1) for part in rows])[self.kept_N][None]


def layout_of(batch: TrainingBatch) -> Layout:
    rows, width = batch.mask_BT.shape
    places_T = torch.arange(width, device=batch.mask_BT.device)
    prompt_B = batch.mask_BT.int().argmax(dim=1) + 1  # its last token predicts the first target
    answer_B = batch.present_BT.sum(dim=1) - prompt_B
    is_first_B = batch.first_B == torch.arange(rows, device=places_T.device)
    own_B = (is_first_B.cumsum(0) - 1)[batch.first_B]  # which of the prompts
    in_prompt_PT, in_answer_BC = up_to(prompt_B[is_first_B]), up_to(answer_B)
    prompts_PT, answers_BC = numbered(in_prompt_PT), numbered(in_answer_BC, first=in_prompt_PT.sum())
    longest_prompt, longest_answer = prompts_PT.shape[1], answers_BC.shape[1]
    keys_BK = torch.cat([prompts_PT[own_B], answers_BC], dim=1)
    prompt_positions_PT = places_T[:longest_prompt].expand_as(prompts_PT)
    answer_positions_BC = prompt_B[:, None] + places_T[:longest_answer]
    key_BT = torch.where(places_T < prompt_B[:, None], places_T, places_T - prompt_B[:, None] + longest_prompt)
    return Layout(
        prompts_PT=prompts_PT,
        answers_BC=answers_BC,
        keys_BK=keys_BK,
        mask_BCK=_seen(in_prompt_PT[own_B], longest_answer),
        kept_N=torch.cat([in_prompt_PT.flatten(), in_answer_BC.flatten()]).nonzero()[:, 0],
        positions_N=torch.cat([prompt_positions_PT[in_prompt_PT], answer_positions_BC[in_answer_BC]]),
        index_BT=keys_BK.gather(1, key_BT.clamp(max=keys_BK.shape[1] - 1)),
    )


def _seen(in_prompt_BT: Tensor, answer: int) -> Tensor:
    """Each token of an answer sees its whole prompt and the answer up to itself."""
    before_CC = torch.ones(answer, answer, dtype=torch.bool, device=in_prompt_BT.device).tril()
    rows = len(in_prompt_BT)
    return torch.cat([in_prompt_BT[:, None].expand(-1, answer, -1), before_CC.expand(rows, -1, -1)], dim=2)


def up_to(lengths_B: Tensor) -> Tensor:
    """bool: the first so many places of each row; at least one column."""
    return torch.arange(max(1, int(lengths_B.max())), device=lengths_B.device) < lengths_B[:, None]


def numbered(present: Tensor, first: Tensor | int = 0) -> Tensor:
    """The places that hold something, numbered through; the others have number 0."""
    return (present.flatten().cumsum(0) - 1 + first).view_as(present).where(present, 0)


def last_hidden(backbone: Any, batch: TrainingBatch) -> Tensor:
    """The last hidden state wherever a completion token is predicted."""
    layout = layout_of(batch)
    tokens_N = torch.empty_like(layout.positions_N)
    tokens_N[layout.index_BT[batch.present_BT]] = batch.inputs_BT[batch.present_BT]
    hidden_1NH = backbone(
        tokens_N[None],
        position_ids=layout.positions_N[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=tokens_N.device),  # four axes: do not make one
        use_cache=False,
        layout=layout,
    ).last_hidden_state
    return hidden_1NH[0, layout.index_BT[batch.mask_BT]]


def make_flat(model: Any) -> bool:
    """Teach a model to work on a line of tokens; False, and nothing changed, where that would not be exact."""
    below = model.config._attn_implementation
    if below.startswith(PREFIX):
        return True
    if below not in BELOW or _looks_back_only_so_far(model.config.get_text_config()):
        return False
    model.set_attn_implementation(f"{PREFIX}{below}")
    if _is_exact(model):
        return True
    model.set_attn_implementation(below)
    return False


def _looks_back_only_so_far(config: Any) -> bool:
    """Attention with a window needs a mask. Qwen2 names a window that it does not use."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return set(kinds) != {"full_attention"}
    return bool(getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None))


@torch.no_grad()
def _is_exact(model: Any) -> bool:
    """Two short answers to one prompt, both ways: a family with an attention of its own kind is left alone."""
    inputs_BT = torch.tensor([[1, 2, 3, 4, 0], [1, 2, 5, 6, 7]], device=model.device)
    mask_BT = torch.tensor([[0, 1, 1, 1, 0], [0, 1, 1, 1, 1]], device=model.device).bool()
    nothing_B = torch.zeros(2, device=model.device)
    first_B = torch.zeros(2, dtype=torch.long, device=model.device)
    batch = TrainingBatch(inputs_BT, inputs_BT, mask_BT, inputs_BT, nothing_B, nothing_B, nothing_B, first_B)
    backbone = model.get_decoder()
    expected_NH = backbone(inputs_BT, use_cache=False).last_hidden_state[mask_BT].float()
    try:
        found_NH = last_hidden(backbone, batch).float()
    except (TypeError, RuntimeError, IndexError):  # it does not hand the layout on to its attention
        return False
    return bool((found_NH - expected_NH).abs().max() <= 0.02 * expected_NH.abs().max())  # bf16 rounds to 0.4 %


def _attention(below: str) -> Any:
    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        layout: Layout | None = options.pop("layout", None)
        plain = AttentionInterface()[below]
        if layout is None:  # while sampling
            return plain(module, query, key, value, attention_mask, **options)
        prompts = (layout.rows(part, layout.prompts_PT) for part in (query, key, value))
        asking = layout.rows(query, layout.answers_BC)
        looked_at = (layout.rows(part, layout.keys_BK) for part in (key, value))
        seen, _ = plain(module, *prompts, None, **options)
        said, _ = plain(module, asking, *looked_at, layout.mask_BCK[:, None], **options)
        return layout.line(seen, said), None

    return attention


for _below in BELOW:
    AttentionInterface.register(f"{PREFIX}{_below}", _attention(_below))
    AttentionMaskInterface.register(f"{PREFIX}{_below}", AttentionMaskInterface()[_below])
