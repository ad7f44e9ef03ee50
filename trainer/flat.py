"""loss: each token goes through the layers once. A prompt stands there once for all its answers, and padding nowhere.

Only attention mixes positions, so only there tokens have to stand in rows. Everything else, which is nearly all of the
work, sees one line of tokens:

    rows    5 6 7 8 .    5 6 9 . .    4 3 2 1 8        three answers, the first two to the prompt 5 6
    line    5 6 7 8 9 4 3 2 1 8                        10 tokens for 15 places

`Layout` says where each place of the rows stands in the line. The attention function below lays queries, keys and
values out as rows, calls the model's own attention, and puts the result back into the line.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from trainer.types import TrainingBatch

PREFIX = "octet_flat_"
BELOW = ("sdpa", "flash_attention_2")  # need no mask where padding stands on the right


class Layout(NamedTuple):
    index_BT: Tensor  # place in the line; 0 for padding, which nobody looks at
    kept_N: Tensor  # which of the B x T places stand in the line

    def rows(self, line_1HND: Tensor) -> Tensor:
        return line_1HND[0].transpose(0, 1)[self.index_BT].transpose(1, 2)

    def line(self, rows_BTHD: Tensor) -> Tensor:
        return rows_BTHD.flatten(0, 1)[self.kept_N][None]


def layout_of(batch: TrainingBatch) -> Layout:
    present_BT, mask_BT = batch.present_BT, batch.mask_BT
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    in_prompt_BT = positions_T <= mask_BT.int().argmax(dim=1, keepdim=True)  # its last token predicts the first target
    is_first_B = batch.first_B == torch.arange(len(mask_BT), device=mask_BT.device)
    kept_BT = present_BT & (~in_prompt_BT | is_first_B[:, None])
    own_BT = kept_BT.flatten().cumsum(0).view_as(kept_BT) - 1
    index_BT = own_BT[batch.first_B].where(in_prompt_BT, own_BT).where(present_BT, 0)
    return Layout(index_BT, kept_BT.flatten().nonzero()[:, 0])


def last_hidden(backbone: Any, batch: TrainingBatch) -> Tensor:
    """The last hidden state wherever a completion token is predicted."""
    layout, width = layout_of(batch), batch.inputs_BT.shape[1]
    hidden_1NH = backbone(
        batch.inputs_BT.flatten()[layout.kept_N][None],
        position_ids=(layout.kept_N % width)[None],
        attention_mask=torch.empty(1, 1, 1, 1, device=layout.kept_N.device),  # four axes: do not make one
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
        rows = (layout.rows(part) for part in (query, key, value))
        return layout.line(plain(module, *rows, None, **options)[0]), None

    return attention


for _below in BELOW:
    AttentionInterface.register(f"{PREFIX}{_below}", _attention(_below))
    AttentionMaskInterface.register(f"{PREFIX}{_below}", AttentionMaskInterface()[_below])
