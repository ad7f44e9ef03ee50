"""Attention: rotary positions, full or in a sliding window, over the keys and values of each row."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from trainer.model.families import Family
from trainer.rollout.decoder.layers.norm import Norm
from trainer.rollout.decoder.layers.passes import Keys, Pass, Prompts, Step
from trainer.rollout.decoder.weights import Projection


class Attention:
    def __init__(self, module: Any, config: Any, index: int, family: Family) -> None:
        self.index, self.head_size, self.scale = index, module.head_dim, module.scaling
        self.query_heads = config.num_attention_heads
        self.kv_heads = self.query_heads // module.num_key_value_groups
        heads = ("qkv_proj",) if family.is_joined else ("q_proj", "k_proj", "v_proj")
        self.qkv = Projection([getattr(module, name) for name in heads])
        self.out = Projection([getattr(module, family.part("o_proj"))])
        self.projections = [self.qkv, self.out]
        of_all = config.sliding_window if family.windows == "every layer" else None
        self.window = getattr(module, "sliding_window", of_all)
        self.kind = config.layer_types[index] if has_kinds_of_rope(config) else ""
        self.rotates = getattr(module, "use_rope", True)  # SmolLM3 has layers without positions
        made = [getattr(module, family.part(name), None) for name in ("q_norm", "k_norm")]
        self.of_queries, self.of_keys = [norm if norm is None else Norm(norm, family.adds_one) for norm in made]
        self.norms = [norm for norm in (self.of_queries, self.of_keys) if norm]
        self.keeps = [Keys(2 * self.kv_heads, self.head_size)]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        heads_NhD = self.qkv(hidden_NH).view(len(hidden_NH), -1, self.head_size)
        parts = heads_NhD.split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
        for part_NhD, norm in zip(parts, (self.of_queries, self.of_keys)):
            if norm is not None:  # of each head, or of all heads together
                part_NhD.copy_(norm(part_NhD.reshape(len(part_NhD), -1, len(norm.weight))).view_as(part_NhD))
        if self.rotates:
            _rotate(heads_NhD[:, : self.query_heads + self.kv_heads], *at.angles[self.kind])
        return self.out(self._within(heads_NhD, at) if isinstance(at, Prompts) else self._behind(heads_NhD, at))

    def _within(self, heads_NhD: Tensor, at: Prompts) -> Tensor:
        """Attend within each prompt, and keep its keys and values."""
        prompts = len(at.lengths_P)
        heads_PhTD = heads_NhD.view(prompts, at.width, -1, self.head_size).transpose(1, 2)
        queries, keys_values = heads_PhTD.split([self.query_heads, 2 * self.kv_heads], dim=1)
        (kept_RKTD,) = at.cache.of_layer[self.index]
        kept_RKTD[at.rows, :, : at.width] = keys_values.repeat_interleave(at.groups_P, dim=0)
        keys, values = keys_values.chunk(2, dim=1)
        if at.repeats_keys:
            keys, values = (part.repeat_interleave(self.query_heads // self.kv_heads, 1) for part in (keys, values))
        mask_TT = at.masks[self.window]
        output = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask_TT,
            is_causal=mask_TT is None,
            scale=self.scale,
            enable_gqa=not at.repeats_keys,
        )
        return output.transpose(1, 2).reshape(prompts * at.width, -1)

    def _behind(self, heads_BhD: Tensor, at: Step) -> Tensor:
        """Add a token to each row, and attend to the row up to there."""
        slots = at.slots[self.index]
        slots.all_SD.index_copy_(0, slots.new_N, heads_BhD[:, self.query_heads :].flatten(0, 1))
        # query heads that share keys take the axis of several query positions
        shared = heads_BhD[:, : self.query_heads].reshape(len(heads_BhD), self.kv_heads, -1, self.head_size)
        output = F.scaled_dot_product_attention(
            shared, slots.keys_BKTD, slots.values_BKTD, attn_mask=at.masks[self.window], scale=self.scale
        )
        return output.reshape(len(heads_BhD), -1)


def has_kinds_of_rope(config: Any) -> bool:
    """Return True if full and sliding attention have different rotary angles, as in Gemma 3."""
    return isinstance(config.rope_parameters.get("full_attention"), dict)


def _rotate(heads_NhD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
    """Apply the rotary embedding in place, to the first part of each head where the angles are fewer."""
    turned_NhD = heads_NhD[..., : cos_N1D.shape[-1]]
    swapped_NhD = turned_NhD.roll(cos_N1D.shape[-1] // 2, dims=-1)
    turned_NhD.mul_(cos_N1D).addcmul_(swapped_NhD, sin_N1D)
