"""Attention over the keys and values of each row: rotary or without positions, full or in a sliding window."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.families import Family
from trainer.rollout.decoder.layers.passes import Keys, Pass, Prompts, Step
from trainer.rollout.decoder.weights import Norm, Projection


class Attention:
    def __init__(self, module: Any, config: Any, index: int, family: Family) -> None:
        self.index, self.head_size, self.scale = index, module.head_dim, module.scaling
        self.query_heads = config.num_attention_heads
        self.kv_heads = self.query_heads // module.num_key_value_groups
        names = ("qkv_proj",) if family.is_joined else ("q_proj", "k_proj", "v_proj", "g_proj")
        layers = [getattr(module, name, None) for name in names]
        self.qkv = Projection([layer for layer in layers if layer is not None])
        self.out = Projection([getattr(module, family.part("o_proj"))])
        self.projections = [self.qkv, self.out]
        default_window = config.sliding_window if family.windows == "every layer" else None
        self.window = getattr(module, "sliding_window", default_window)
        self.kind = config.layer_types[index] if has_kinds_of_rope(config) else ""
        all_rotate = getattr(config, "position_embedding_type", "rope") == "rope"  # Granite 4
        self.rotates = getattr(module, "use_rope", all_rotate)  # SmolLM3 has layers without positions
        if family.kind == "Exaone4" and self.window and not module.is_sliding:
            self.window, self.rotates = None, False  # full attention has no positions there
        self.rotates_first = family.rotates_first
        norms = [getattr(module, family.part(name), None) for name in ("q_norm", "k_norm")]
        self.head_norms = [norm if norm is None else Norm(norm, family.adds_one) for norm in norms]
        # Gemma 4: the values may be the keys, have a norm without weights, and layers may use those of an earlier one
        self.values_are_keys = hasattr(module, "v_proj") and module.v_proj is None
        self.value_epsilon = module.v_norm.eps if hasattr(module, "v_norm") else None
        self.lends = getattr(module, "store_full_length_kv", False)
        self.source, self.own_heads = index, self.kv_heads
        if getattr(module, "is_kv_shared_layer", False):
            before = config.layer_types[: -config.num_kv_shared_layers]
            self.source, self.own_heads = max(i for i, kind in enumerate(before) if kind == module.layer_type), 0
        self.keeps = [Keys(2 * self.own_heads, self.head_size)] if self.own_heads else []
        self.is_gated, self.gates_heads = family.is_gated, getattr(module, "g_proj", None) is not None

    def __call__(self, hidden_NH: Tensor, at: Pass) -> Tensor:
        outputs_NO = self.qkv(hidden_NH)
        if self.gates_heads:
            gates, outputs_NO = outputs_NO[:, -self.query_heads :, None], outputs_NO[:, : -self.query_heads]
        heads_NhD = outputs_NO.view(len(hidden_NH), -1, self.head_size)
        if self.is_gated:  # each head of queries is followed by a gate
            gates, end = heads_NhD[:, 1 : 2 * self.query_heads : 2], 2 * self.query_heads
            heads_NhD = torch.cat((heads_NhD[:, :end:2], heads_NhD[:, end:]), dim=1)
        if self.values_are_keys:
            heads_NhD = torch.cat((heads_NhD, heads_NhD[:, self.query_heads :]), dim=1)
        if self.rotates_first:
            self._turn(heads_NhD, at)
        queries, keys, values = heads_NhD.split([self.query_heads, self.own_heads, self.own_heads], dim=1)
        for part_NhD, norm in zip((queries, keys), self.head_norms, strict=True):
            if norm is not None:  # over each head, or over all heads together
                part_NhD.copy_(norm(part_NhD.reshape(len(part_NhD), -1, len(norm.weight))).view_as(part_NhD))
        if self.value_epsilon is not None:
            values.copy_(F.rms_norm(values, values.shape[-1:], None, self.value_epsilon))
        if not self.rotates_first:
            self._turn(heads_NhD, at)
        output_NO = self._within(heads_NhD, at) if isinstance(at, Prompts) else self._behind(heads_NhD, at)
        if not (self.is_gated or self.gates_heads):
            return output_NO
        return (output_NO.view(len(output_NO), self.query_heads, -1) * gates.sigmoid()).flatten(1)

    def _turn(self, heads_NhD: Tensor, at: Pass) -> None:
        """Apply the rotary embedding to queries and keys, in a layer that has one."""
        if self.rotates:
            _rotate(heads_NhD[:, : self.query_heads + self.own_heads], *at.angles[self.kind])

    def _within(self, heads_NhD: Tensor, at: Prompts) -> Tensor:
        """Attend within each prompt and to the common prefix, and write the keys and values to the cache."""
        prompts = len(at.lengths_P)
        heads_PhTD = heads_NhD.view(prompts, at.width, -1, self.head_size).transpose(1, 2)
        queries, keys_values = heads_PhTD.split([self.query_heads, 2 * self.own_heads], dim=1)
        if self.own_heads:
            (kept_RKTD,) = at.cache.of_layer[self.index]
            if at.before:
                beginning_PKTD = at.beginning(self.index, 0)[:, :, : at.before]
                keys_values = torch.cat((beginning_PKTD, keys_values), dim=2)
            kept_RKTD[at.rows, :, : at.before + at.width] = keys_values.repeat_interleave(at.groups_P, dim=0)
        if self.lends:
            at.lent[self.index] = keys_values
        keys_values = at.lent.get(self.source, keys_values)
        keys, values = keys_values.chunk(2, dim=1)
        mask_TT, grouped = at.masks[self.window], not at.repeats_keys
        if not grouped:
            keys, values = (part.repeat_interleave(self.query_heads // self.kv_heads, 1) for part in (keys, values))
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask_TT, is_causal=mask_TT is None, scale=self.scale, enable_gqa=grouped
        )
        return output.transpose(1, 2).reshape(prompts * at.width, -1)

    def _behind(self, heads_BhD: Tensor, at: Step) -> Tensor:
        """Add a token to each row, and attend to the row up to this token."""
        places_SD, new_BK, keys_BKTD, values_BKTD = at.slots[self.source]
        if self.own_heads:
            places_SD.index_put_((new_BK,), heads_BhD[:, self.query_heads :])
        # the query heads that share a key head are passed as several query positions
        shared = heads_BhD[:, : self.query_heads].reshape(len(heads_BhD), self.kv_heads, -1, self.head_size)
        output = F.scaled_dot_product_attention(
            shared, keys_BKTD, values_BKTD, attn_mask=at.masks[self.window], scale=self.scale
        )
        return output.reshape(len(heads_BhD), -1)


def has_kinds_of_rope(config: Any) -> bool:
    """Return True if full and sliding attention have different rotary angles, as in Gemma 3."""
    return isinstance(config.rope_parameters.get("full_attention"), dict)


def matrices(cos_N1D: Tensor, sin_N1D: Tensor) -> Tensor:
    """Return the rotation matrix of each token, so that a card rotates all heads with one product."""
    size = cos_N1D.shape[-1]
    eye_DD = torch.eye(size, dtype=cos_N1D.dtype, device=cos_N1D.device)
    return (eye_DD * cos_N1D).addcmul_(eye_DD.roll(size // 2, dims=1), sin_N1D)


def _rotate(heads_NhD: Tensor, *angles: Tensor) -> None:
    """Apply the rotary embedding in place. If there are fewer angles than `D`, only the first part of each head is
    rotated."""
    part_NhD = heads_NhD[..., : angles[0].shape[-1]]
    if len(angles) == 1:
        part_NhD.copy_(torch.bmm(part_NhD, *angles))
        return
    cos_N1D, sin_N1D = angles
    swapped_NhD = part_NhD.roll(cos_N1D.shape[-1] // 2, dims=-1)
    part_NhD.mul_(cos_N1D).addcmul_(swapped_NhD, sin_N1D)
