"""A forward pass for sampling, with the model's own weights and a static cache, for models of the Llama kind: rotary
positions, gated feed-forward layers, RMS norms before or after them, full or sliding-window attention.

Axes in addition to those of `records.py`: L layers, R rows of the cache, K key/value heads (2K: keys, then values),
h query, key and value heads together, D size of a head, N tokens of all rows, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import ConfigError
from trainer.model.ends import HostEmbedding, causal_lm_of, head_of
from trainer.model.families import BY_CLASS, Family
from trainer.model.load import needs_repeated_keys
from trainer.rollout.decoder.weights import Projection, copy_what_fits

ROPES = ("default", "linear", "llama3", "yarn", "longrope")  # other types change the angles with the length
ATTENTIONS = ("full_attention", "sliding_attention")
# The names of the norms before and after attention, then before and after the feed-forward layers.
NORMS = {
    "before": ("input", "", "post_attention", ""),
    "after": ("", "post_attention", "", "post_feedforward"),
    "both": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}

Attention = Callable[[int, Tensor], Tensor]  # from the index of a layer and its q, k and v heads to the output


class Norm:
    """An RMS norm. Gemma stores its weight less 1; the sum is kept, at an address that captured steps may read."""

    def __init__(self, norm: Any, epsilon: float, adds_one: bool) -> None:
        self.norm, self.epsilon, self.adds_one = norm, epsilon, adds_one
        self.weight = norm.weight.float() + 1 if self.adds_one else norm.weight

    def refresh(self) -> None:
        if self.adds_one:
            self.weight.copy_(self.norm.weight).add_(1)
        else:
            self.weight = self.norm.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        exact = hidden.to(self.weight.dtype)  # in fp32 where a 1 is added, which bf16 would round
        return F.rms_norm(exact, self.weight.shape, self.weight, self.epsilon).to(hidden.dtype)


class Layer:
    """One decoder block with its projections and norms."""

    def __init__(self, block: Any, config: Any, index: int, family: Family) -> None:
        attention, mlp = block.self_attn, block.mlp
        heads = ("qkv_proj",) if family.is_joined else ("q_proj", "k_proj", "v_proj")
        gates = ("gate_up_proj",) if family.is_joined else ("gate_proj", "up_proj")
        self.qkv = Projection([getattr(attention, name) for name in heads])
        self.out = Projection([attention.o_proj])
        self.gate_up = Projection([getattr(mlp, name) for name in gates])
        self.down = Projection([mlp.down_proj])
        self.projections = (self.qkv, self.out, self.gate_up, self.down)
        self.activation = mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn
        of_all = config.sliding_window if family.windows == "every layer" else None
        self.window = getattr(attention, "sliding_window", of_all)
        self.kind = config.layer_types[index] if _has_kinds_of_rope(config) else ""
        self.rotates = getattr(attention, "use_rope", True)  # SmolLM3 has layers without positions
        made = [getattr(block, f"{name}_layernorm", None) for name in NORMS[family.norms]]
        made += [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        norms = [norm if norm is None else Norm(norm, config.rms_norm_eps, family.adds_one) for norm in made]
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms[:4]
        self.of_queries, self.of_keys = norms[4:]
        self.norms = [norm for norm in norms if norm]


def _has_kinds_of_rope(config: Any) -> bool:
    """Return True if full and sliding attention have different rotary angles, as in Gemma 3."""
    return isinstance(config.rope_parameters.get("full_attention"), dict)


class Forward:
    def __init__(self, model: Any, copies: bool = True) -> None:
        causal_lm = causal_lm_of(model)
        self.model, self.config = causal_lm, causal_lm.config
        self.decoder = causal_lm.get_decoder()
        attention, embedding = self.decoder.layers[0].self_attn, self.decoder.embed_tokens
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.query_heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        scale = getattr(embedding, "embed_scale", getattr(self.decoder, "embedding_multiplier", None))  # Gemma, Granite
        self.embedding_scale = scale.to(embedding.weight.dtype) if isinstance(scale, Tensor) else scale
        self.residual_scale = getattr(self.config, "residual_multiplier", 1.0)
        family = BY_CLASS[type(causal_lm).__name__]
        self.layers = [Layer(block, self.config, index, family) for index, block in enumerate(self.decoder.layers)]
        self.last_norm = Norm(self.decoder.norm, self.config.rms_norm_eps, family.adds_one)
        self.windows = {layer.window for layer in self.layers}
        self.head, self.finish = Projection([causal_lm.get_output_embeddings()]), head_of(causal_lm).finish
        self.embeds_on_host = isinstance(embedding, HostEmbedding)
        self.dtype, self.device = self.decoder.norm.weight.dtype, self.decoder.norm.weight.device
        self.repeats_keys = needs_repeated_keys(self.device, self.dtype)
        self.projections = [projection for layer in self.layers for projection in layer.projections] + [self.head]
        if copies:
            copy_what_fits(self.projections, self.device)

    @property
    def addresses(self) -> int:
        """A hash of the addresses that captured steps read weights from. It changes while values are swapped in."""
        return hash(tuple(parameter.data_ptr() for parameter in self.model.parameters()))

    def allocate_cache(self, rows: int, places: int) -> Tensor:
        """Allocate keys and values for `rows` sequences of up to `places` tokens."""
        self._make_angles(places)
        shape = (len(self.layers), rows, 2 * self.kv_heads, places, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)  # masked, but 0 x NaN would be NaN

    def _make_angles(self, places: int) -> None:
        """Compute cosines and sines. The sines carry the sign of their half, so that `_rotate` needs two products."""
        rotary, hidden = self.decoder.rotary_emb, self.decoder.norm.weight
        positions_1T = torch.arange(places, device=self.device)[None]
        self._refuse_other_angles(places)
        self.angles: dict[str, tuple[Tensor, Tensor]] = {}
        for kind in {layer.kind for layer in self.layers}:
            cos, sin = rotary(hidden, positions_1T, *([kind] if kind else []))
            half = cos.shape[-1] // 2
            self.angles[kind] = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def _refuse_other_angles(self, places: int) -> None:
        """Raise ConfigError beyond the original context of a model that computes something else there: with longrope
        the angles of all tokens change while an answer grows, and Ministral 3 scales its queries."""
        rope = self.config.rope_parameters
        changes = rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta")
        if changes and places > (most := rope["original_max_position_embeddings"]):
            reason = f"prompt and answer may have {places} tokens, and this model attends in another way beyond {most}"
            remedy = "Write a smaller rollout.max_new_tokens or prompt.max_tokens, or rollout.engine=hf"
            raise ConfigError("rollout.max_new_tokens", reason, remedy)

    def refresh(self) -> None:
        """Read the present weights, which may have been updated or swapped."""
        self.embedding_VH = self.decoder.embed_tokens.weight
        for norm in (self.last_norm, *(norm for layer in self.layers for norm in layer.norms)):
            norm.refresh()
        for projection in self.projections:
            projection.refresh()
        self.adapters = tuple(adapter for projection in self.projections for adapter in projection.live_adapters)

    def prefill(self, tokens_PT: Tensor, lengths_P: Tensor, cache_LBKTD: Tensor, groups_P: Tensor) -> Tensor:
        """Return the logits after each prompt and write its keys and values to the rows of its group.

        Prompts are padded on the right, where causal attention never looks.
        """
        prompts, width = tokens_PT.shape
        masks = {window: self._window_mask(window, width) for window in self.windows}

        def attend(layer: int, heads_NhD: Tensor) -> Tensor:
            heads_PhTD = heads_NhD.view(prompts, width, -1, self.head_size).transpose(1, 2)
            queries, keys_values = heads_PhTD.split([self.query_heads, 2 * self.kv_heads], dim=1)
            cache_LBKTD[layer, :, :, :width] = keys_values.repeat_interleave(groups_P, dim=0)
            keys, values = keys_values.chunk(2, dim=1)
            if self.repeats_keys:
                keys, values = (part.repeat_interleave(self.query_heads // self.kv_heads, 1) for part in (keys, values))
            mask_TT = masks[self.layers[layer].window]
            output = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask_TT,
                is_causal=mask_TT is None,
                scale=self.scale,
                enable_gqa=not self.repeats_keys,
            )
            return output.transpose(1, 2).reshape(prompts * width, -1)

        positions_N = torch.arange(width, device=self.device).repeat(prompts)
        hidden_NH = self._run(self.embed(tokens_PT.flatten()), positions_N, attend)
        last_P = torch.arange(prompts, device=self.device) * width + lengths_P - 1
        return self.finish(self.head(self.last_norm(hidden_NH[last_P])))

    def _window_mask(self, window: int | None, width: int) -> Tensor | None:
        """Return True where a token of a prompt is attended to, or None if the window holds the whole prompt."""
        if window is None or width <= window:
            return None
        ones_TT = torch.ones(width, width, dtype=torch.bool, device=self.device)
        return ones_TT.tril().triu(1 - window)

    def step(self, hidden_BH: Tensor, places_B: Tensor, mask_BT: Tensor, cache_LRKTD: Tensor) -> Tensor:
        """Return the logits after one more token of each row. `hidden_BH` are the embeddings of these tokens, which are
        overwritten; `mask_BT` is 0 where a row may attend, else -inf."""
        (rows, width), places = mask_BT.shape, cache_LRKTD.shape[3]
        masks = {window: self._within(window, mask_BT, places_B)[:, None, None] for window in self.windows}
        # what all layers share is computed once: in a small model it costs as much as the matmuls
        slots = cache_LRKTD.view(len(self.layers), -1, self.head_size).unbind()
        slot_of_BK = torch.arange(rows * 2 * self.kv_heads, device=self.device).view(rows, -1) * places
        slot_of_BK += places_B[:, None]
        seen = cache_LRKTD[:, :rows, :, :width]
        keys, values = (half.unbind() for half in seen.chunk(2, dim=2))

        def attend(layer: int, heads_BhD: Tensor) -> Tensor:
            slots[layer].index_copy_(0, slot_of_BK.view(-1), heads_BhD[:, self.query_heads :].flatten(0, 1))
            # query heads that share keys take the axis of several query positions
            shared = heads_BhD[:, : self.query_heads].reshape(rows, self.kv_heads, -1, self.head_size)
            output = F.scaled_dot_product_attention(
                shared, keys[layer], values[layer], attn_mask=masks[self.layers[layer].window], scale=self.scale
            )
            return output.reshape(rows, -1)

        return self.finish(self.head(self.last_norm(self._run(hidden_BH, places_B, attend))))

    def _within(self, window: int | None, mask_BT: Tensor, places_B: Tensor) -> Tensor:
        """Return the mask with -inf before the window of each row as well."""
        if window is None or mask_BT.shape[1] <= window:
            return mask_BT
        places_T = torch.arange(mask_BT.shape[1], device=self.device)
        return mask_BT.masked_fill(places_T <= places_B[:, None] - window, float("-inf"))

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the embeddings of tokens. With the embedding in CPU memory this waits for the device."""
        on_host = self.embeds_on_host
        hidden_NH = self.decoder.embed_tokens(tokens_N) if on_host else F.embedding(tokens_N, self.embedding_VH)
        return hidden_NH if self.embedding_scale is None else hidden_NH * self.embedding_scale

    def _run(self, hidden_NH: Tensor, positions_N: Tensor, attend: Attention) -> Tensor:
        """Send embeddings through all layers, and overwrite them with the last hidden state."""
        angles = {
            kind: (cos_TD[positions_N].unsqueeze(1), sin_TD[positions_N].unsqueeze(1))
            for kind, (cos_TD, sin_TD) in self.angles.items()
        }
        for index, layer in enumerate(self.layers):
            heads_NhD = layer.qkv(_normed(hidden_NH, layer.before_attention)).view(len(hidden_NH), -1, self.head_size)
            parts = heads_NhD.split([self.query_heads, self.kv_heads, self.kv_heads], dim=1)
            for part_NhD, norm in zip(parts, (layer.of_queries, layer.of_keys)):
                if norm is not None:  # of each head, or of all heads together
                    normed = norm(part_NhD.reshape(len(part_NhD), -1, len(norm.weight)))
                    part_NhD.copy_(normed.view_as(part_NhD))
            if layer.rotates:
                _rotate(heads_NhD[:, : self.query_heads + self.kv_heads], *angles[layer.kind])
            attended_NH = _normed(layer.out(attend(index, heads_NhD)), layer.after_attention)
            hidden_NH.add_(attended_NH, alpha=self.residual_scale)
            gate, up = layer.gate_up(_normed(hidden_NH, layer.before_mlp)).chunk(2, dim=-1)
            fed_NH = _normed(layer.down(layer.activation(gate).mul_(up)), layer.after_mlp)
            hidden_NH.add_(fed_NH, alpha=self.residual_scale)
        return hidden_NH


def _normed(hidden_NH: Tensor, norm: Norm | None) -> Tensor:
    return hidden_NH if norm is None else norm(hidden_NH)


def _rotate(heads_NhD: Tensor, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
    """Apply the rotary embedding in place, to the first part of each head where the angles are fewer."""
    turned_NhD = heads_NhD[..., : cos_N1D.shape[-1]]
    swapped_NhD = turned_NhD.roll(cos_N1D.shape[-1] // 2, dims=-1)
    turned_NhD.mul_(cos_N1D).addcmul_(swapped_NhD, sin_N1D)


def why_unsupported(model: Any) -> str | None:
    """Return the reason why this forward pass would differ from the model's own, or None if it does not."""
    return next(_reasons(model), None)


def _reasons(model: Any) -> Iterator[str]:
    causal_lm = causal_lm_of(model)
    config, kind = causal_lm.config, type(causal_lm).__name__
    others = Counter(one for one in getattr(config, "layer_types", None) or () if one not in ATTENTIONS)
    if others:
        yield f"it has layers of another kind ({', '.join(f'{count} x {one}' for one, count in others.items())})"
    known = [name for name, family in BY_CLASS.items() if family.decodes]
    if kind not in known or not type(causal_lm).__module__.startswith("transformers."):
        yield f"{kind} is not one of {', '.join(known)}"
        return
    ropes = [config.rope_parameters]
    if _has_kinds_of_rope(config):
        ropes = [config.rope_parameters[kind] for kind in set(config.layer_types)]
    for rope in ropes:
        if rope["rope_type"] not in ROPES:
            yield f"its rope_type is {rope['rope_type']}, not one of {', '.join(ROPES)}"
    window, attention = getattr(config, "sliding_window", None), causal_lm.get_decoder().layers[0].self_attn
    if window and BY_CLASS[kind].windows != "every layer" and not hasattr(attention, "sliding_window"):
        yield f"its configuration names a sliding window of {window} tokens, which {kind} does not have"
    if getattr(config, "use_bidirectional_attention", None):
        yield "its attention also looks ahead"
    if getattr(model, "peft_type", "LORA") != "LORA":
        yield f"its adapter is {model.peft_type.value}, not LoRA"
    if not isinstance(causal_lm.get_input_embeddings(), (nn.Embedding, HostEmbedding)):
        yield "its input embedding has an adapter"
    if not all(parameter.numel() for parameter in model.parameters()):
        yield "its weights are split over the ranks"
