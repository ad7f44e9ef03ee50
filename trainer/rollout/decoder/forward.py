"""The forward pass of Qwen2, Qwen3, Llama and Mistral for sampling, with the model's own weights and a static cache.

Axes in addition to those of `records.py`: L layers, R rows of the cache, K key/value heads (2K: keys, then values),
h query, key and value heads together, D size of a head, N tokens of all rows, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.model.head import causal_lm_of
from trainer.rollout.decoder.weights import Projection, copy_what_fits

FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")  # other types change the angles with the length

Attention = Callable[[int, Tensor], Tensor]  # from the index of a layer and its q, k and v heads to the output


def needs_repeated_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if only the slow attention kernel, which keeps all scores, takes fewer heads of keys than of queries:
    on cards before Ampere, and in fp32 on every card."""
    return device.type == "cuda" and (dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0))


class Layer:
    """One decoder block with its projections."""

    def __init__(self, block: Any) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.block = block
        self.qkv = Projection([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Projection([attention.o_proj])
        self.gate_up = Projection([mlp.gate_proj, mlp.up_proj])
        self.down = Projection([mlp.down_proj])
        self.projections = (self.qkv, self.out, self.gate_up, self.down)

    def read_norms(self) -> None:
        self.norm_H = self.block.input_layernorm.weight
        self.mlp_norm_H = self.block.post_attention_layernorm.weight


class Forward:
    def __init__(self, model: Any, copies: bool = True) -> None:
        causal_lm = causal_lm_of(model)
        self.model, self.config = causal_lm, causal_lm.config
        self.decoder = causal_lm.get_decoder()
        attention = self.decoder.layers[0].self_attn
        self.head_size, self.scale = attention.head_dim, attention.scaling
        self.query_heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.epsilon = self.config.rms_norm_eps
        self.has_head_norms = hasattr(attention, "q_norm")
        self.layers = [Layer(block) for block in self.decoder.layers]
        self.head = Projection([causal_lm.get_output_embeddings()])
        weight_VH = self.decoder.embed_tokens.weight
        self.dtype, self.device = weight_VH.dtype, weight_VH.device
        self.repeats_keys = needs_repeated_keys(self.device, self.dtype)
        self.projections = [projection for layer in self.layers for projection in layer.projections] + [self.head]
        if copies:
            copy_what_fits(self.projections, self.device)

    @property
    def addresses(self) -> int:
        """A hash of the addresses that captured steps read weights from. It changes while values are swapped in."""
        return hash(tuple(parameter.data_ptr() for parameter in self.model.parameters()))

    def cache(self, rows: int, places: int) -> Tensor:
        """Allocate keys and values for `rows` sequences of up to `places` tokens."""
        self._make_angles(places)
        shape = (len(self.layers), rows, 2 * self.kv_heads, places, self.head_size)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)  # masked, but 0 x NaN would be NaN

    def _make_angles(self, places: int) -> None:
        """Compute cosines and sines. The sines carry the sign of their half, so that `_rotate` needs two products."""
        positions_T = torch.arange(places, device=self.device)
        cos, sin = self.decoder.rotary_emb(self.decoder.embed_tokens.weight, positions_T[None])
        half = self.head_size // 2
        self.cos_TD = cos[0]
        self.sin_TD = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def refresh(self) -> None:
        """Read the present weights, which may have been updated or swapped."""
        self.embedding_VH = self.decoder.embed_tokens.weight
        self.last_norm_H = self.decoder.norm.weight
        for layer in self.layers:
            layer.read_norms()
        for projection in self.projections:
            projection.refresh()
        self.adapters = tuple(adapter for projection in self.projections for adapter in projection.live_adapters)

    def prefill(self, tokens_PT: Tensor, lengths_P: Tensor, cache_LBKTD: Tensor, groups_P: Tensor) -> Tensor:
        """Return the logits after each prompt and write its keys and values to the rows of its group.

        Prompts are padded on the right, where causal attention never looks.
        """
        prompts, width = tokens_PT.shape

        def attend(layer: int, heads_NhD: Tensor) -> Tensor:
            heads_PhTD = heads_NhD.view(prompts, width, -1, self.head_size).transpose(1, 2)
            queries, keys_values = heads_PhTD.split([self.query_heads, 2 * self.kv_heads], dim=1)
            cache_LBKTD[layer, :, :, :width] = keys_values.repeat_interleave(groups_P, dim=0)
            keys, values = keys_values.chunk(2, dim=1)
            if self.repeats_keys:
                keys, values = (part.repeat_interleave(self.query_heads // self.kv_heads, 1) for part in (keys, values))
            output = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=self.scale, enable_gqa=not self.repeats_keys
            )
            return output.transpose(1, 2).reshape(prompts * width, -1)

        positions_N = torch.arange(width, device=self.device).repeat(prompts)
        hidden_NH = self._run(tokens_PT.flatten(), positions_N, attend)
        last_P = torch.arange(prompts, device=self.device) * width + lengths_P - 1
        return self.head(self._norm(hidden_NH[last_P], self.last_norm_H))

    def step(self, tokens_B: Tensor, places_B: Tensor, mask_BT: Tensor, cache_LRKTD: Tensor) -> Tensor:
        """Return the logits after one more token of each row. `mask_BT` is 0 where a row may attend, else -inf."""
        (rows, width), places = mask_BT.shape, cache_LRKTD.shape[3]
        mask_B11T = mask_BT[:, None, None]
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
                shared, keys[layer], values[layer], attn_mask=mask_B11T, scale=self.scale
            )
            return output.reshape(rows, -1)

        hidden_BH = self._run(tokens_B, places_B, attend)
        return self.head(self._norm(hidden_BH, self.last_norm_H))

    def _run(self, tokens_N: Tensor, positions_N: Tensor, attend: Attention) -> Tensor:
        hidden_NH = F.embedding(tokens_N, self.embedding_VH)
        cos_N1D, sin_N1D = self.cos_TD[positions_N].unsqueeze(1), self.sin_TD[positions_N].unsqueeze(1)
        for index, layer in enumerate(self.layers):
            heads_NhD = layer.qkv(self._norm(hidden_NH, layer.norm_H)).view(len(hidden_NH), -1, self.head_size)
            self._rotate(heads_NhD[:, : self.query_heads + self.kv_heads], layer, cos_N1D, sin_N1D)
            hidden_NH += layer.out(attend(index, heads_NhD))
            gate, up = layer.gate_up(self._norm(hidden_NH, layer.mlp_norm_H)).chunk(2, dim=-1)
            hidden_NH += layer.down(F.silu(gate).mul_(up))
        return hidden_NH

    def _rotate(self, heads_NhD: Tensor, layer: Layer, cos_N1D: Tensor, sin_N1D: Tensor) -> None:
        """Apply the rotary embedding to queries and keys in place."""
        if self.has_head_norms:
            attention = layer.block.self_attn
            queries, keys = heads_NhD.split([self.query_heads, self.kv_heads], dim=1)
            queries.copy_(self._norm(queries, attention.q_norm.weight))
            keys.copy_(self._norm(keys, attention.k_norm.weight))
        swapped_NhD = heads_NhD.roll(self.head_size // 2, dims=-1)
        heads_NhD.mul_(cos_N1D).addcmul_(swapped_NhD, sin_N1D)

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(hidden, weight.shape, weight, self.epsilon)


def why_unsupported(model: Any) -> str | None:
    """Return the reason why this forward pass would differ from the model's own, or None if it does not."""
    return next(_reasons(model), None)


def _reasons(model: Any) -> Iterator[str]:
    causal_lm = causal_lm_of(model)
    config, kind = causal_lm.config, type(causal_lm).__name__
    if kind not in FAMILIES or not type(causal_lm).__module__.startswith("transformers."):
        yield f"{kind} is not one of {', '.join(FAMILIES)}"
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        yield f"it attends through a sliding window of {window} tokens"
    if config.rope_parameters["rope_type"] not in ROPES:
        yield f"its rope_type is {config.rope_parameters['rope_type']}, not one of {', '.join(ROPES)}"
    if config.hidden_act != "silu":
        yield f"its hidden_act is {config.hidden_act}, not silu"
    if getattr(model, "peft_type", "LORA") != "LORA":
        yield f"its adapter is {model.peft_type.value}, not LoRA"
    if type(causal_lm.get_input_embeddings()) is not nn.Embedding:
        yield "its input embedding has an adapter"
    if not all(parameter.numel() for parameter in model.parameters()):
        yield "its weights are split over the ranks"
