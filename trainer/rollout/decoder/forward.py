"""A forward pass for sampling, with the model's own weights and a static cache. Each kind of layer has a file in
`layers/`.

Axes in addition to those of `records.py`: L layers, R rows of the cache, K key/value heads (2K: keys, then values),
h query, key and value heads together, D size of a head, N tokens of all rows, O outputs, C channels, k inputs of a
convolution.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.errors import ConfigError
from trainer.model.embedding_and_head import HostEmbedding, causal_lm_of, head_of
from trainer.model.families import ATTENTIONS, BY_CLASS, MIXERS
from trainer.model.load import needs_repeated_keys
from trainer.rollout.decoder.eight_bits import KINDS
from trainer.rollout.decoder.layers.attention import Attention, has_kinds_of_rope, matrices
from trainer.rollout.decoder.layers.block import Block, LayerInputs
from trainer.rollout.decoder.layers.passes import Angles, Cache, Prompts, Step
from trainer.rollout.decoder.weights import Norm, Projection, copy_what_fits

# Rotary embeddings whose angles do not depend on the length of the sequence, longrope within the original context.
ROPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")


class Forward:
    def __init__(self, model: Any, copies: bool = True, weights: str = "same") -> None:
        causal_lm = causal_lm_of(model)
        self.model, self.config = causal_lm, causal_lm.config
        self.decoder = causal_lm.get_decoder()
        embedding, family = self.decoder.embed_tokens, BY_CLASS[type(causal_lm).__name__]
        scale = getattr(embedding, "embed_scale", getattr(self.decoder, "embedding_multiplier", None))  # Gemma, Granite
        self.embedding_scale = scale.to(embedding.weight.dtype) if isinstance(scale, Tensor) else scale
        self.layers = [Block(block, self.config, index, family) for index, block in enumerate(self.decoder.layers)]
        self.attentions = [layer.mixer for layer in self.layers if isinstance(layer.mixer, Attention)]
        last_norm = getattr(self.decoder, family.part("norm"))
        self.last_norm = Norm(last_norm, family.adds_one)
        self.windows = {attention.window for attention in self.attentions}
        self.head, self.finish = Projection([causal_lm.get_output_embeddings()]), head_of(causal_lm).finish
        self.embeds_on_host = isinstance(embedding, HostEmbedding)
        self.dtype, self.device = last_norm.weight.dtype, last_norm.weight.device
        self.repeats_keys = needs_repeated_keys(self.device, self.dtype)
        self.projections = [projection for layer in self.layers for projection in layer.projections] + [self.head]
        has_inputs = getattr(self.decoder, "hidden_size_per_layer_input", None)  # Gemma 4
        self.layer_inputs = LayerInputs(self.decoder) if has_inputs else None
        if self.layer_inputs:
            self.projections.append(self.layer_inputs.projection)
        self.has_8_bits = copies and weights != "same"
        if self.has_8_bits:
            for projection in self.projections:
                projection.allocate_8_bits(KINDS[weights])
        elif copies:
            copy_what_fits(self.projections, self.device)

    @property
    def addresses(self) -> int:
        """A hash of the addresses of all weights, which change when other values are swapped in."""
        return hash(tuple(parameter.data_ptr() for parameter in self.model.parameters()))

    def allocate_cache(self, rows: int, places: int) -> Cache:
        """Allocate the state of all layers for `rows` sequences of up to `places` tokens."""
        self._make_angles(places)
        return Cache([layer.mixer.keeps for layer in self.layers], rows, places, self.dtype, self.device)

    def _make_angles(self, places: int) -> None:
        """Compute cosines and sines. The first half of the sines is negated, so that `_rotate` needs two products."""
        rotary, hidden = self.decoder.rotary_emb, self.last_norm.norm.weight
        positions_1T = torch.arange(places, device=self.device)[None]
        rope = self.config.rope_parameters
        # longrope changes the angles of all tokens while an answer grows, and Ministral 3 scales its queries
        changes = rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta")
        if changes and places > (most := rope["original_max_position_embeddings"]):
            reason = f"prompt and answer may have {places} tokens, and this model attends in another way beyond {most}"
            remedy = "Write a smaller rollout.max_new_tokens or prompt.max_tokens, or rollout.engine=hf"
            raise ConfigError("rollout.max_new_tokens", reason, remedy)
        self.angles: Angles = {}
        for kind in {attention.kind for attention in self.attentions if attention.rotates}:
            cos, sin = rotary(hidden, positions_1T, *([kind] if kind else []))
            half = cos.shape[-1] // 2
            self.angles[kind] = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    def refresh(self) -> None:
        """Read the current weights, which may have been updated or swapped."""
        for norm in (self.last_norm, *(norm for layer in self.layers for norm in layer.norms)):
            norm.refresh()
        for projection in self.projections:
            projection.refresh()
        self.adapters = tuple(adapter for projection in self.projections for adapter in projection.live_adapters)

    def prefill(
        self, tokens_PT: Tensor, lengths_P: Tensor, cache: Cache, rows: slice, groups_P: Tensor, before: int = 0
    ) -> Tensor:
        """Return the logits after each prompt, and write the state of the layers into the rows of its group. Prompts
        are padded on the right, which causal layers never read. They continue `before` tokens in the first row."""
        self._read_8_bits(False)  # 8 bits save no time here: a pass over many tokens is bound by arithmetic
        prompts, width = tokens_PT.shape
        positions_N = torch.arange(before, before + width, device=self.device).repeat(prompts)
        masks = {window: self._prompt_mask(window, width, before) for window in self.windows}
        angles, tokens_N = self._angles_at(positions_N), tokens_PT.flatten()
        hidden_NH = self.embed(tokens_N)
        inputs_LNp = self.layer_inputs(tokens_N, hidden_NH) if self.layer_inputs else None
        at = Prompts(before, width, lengths_P, groups_P, rows, cache, angles, masks, inputs_LNp, {}, self.repeats_keys)
        for layer in self.layers:
            layer(hidden_NH, at)
        last_P = torch.arange(prompts, device=self.device) * width + lengths_P - 1
        return self.finish(self.head(self.last_norm(hidden_NH[last_P])))

    def _prompt_mask(self, window: int | None, width: int, before: int) -> Tensor | None:
        """Return a mask that is True where a token attends, or None if each token attends to all up to itself."""
        whole = before + width
        if not before and (window is None or width <= window):
            return None
        seen_TT = torch.ones(width, whole, dtype=torch.bool, device=self.device).tril(before)
        return seen_TT.triu(before + 1 - (window or whole))

    def step(
        self, tokens_B: Tensor, hidden_BH: Tensor, places_B: Tensor, running_B: Tensor, mask_BT: Tensor, cache: Cache
    ) -> Tensor:
        """Return the logits after one more token of each row. `hidden_BH` has the embeddings of these tokens, and is
        overwritten. `mask_BT` is 0 where a row may attend, else -inf."""
        self._read_8_bits(True)
        masks = {window: self._within(window, mask_BT, places_B)[:, None, None] for window in self.windows}
        slots = cache.slots(places_B, mask_BT.shape[1])
        inputs_LNp = self.layer_inputs(tokens_B, hidden_BH) if self.layer_inputs else None
        angles = self._angles_at(places_B)
        if self.device.type == "cuda":
            angles = {kind: (matrices(*cos_sin),) for kind, cos_sin in angles.items()}
        at = Step(running_B, cache, slots, angles, masks, inputs_LNp)
        for layer in self.layers:
            layer(hidden_BH, at)
        return self.finish(self.head(self.last_norm(hidden_BH)))

    def _read_8_bits(self, reads: bool) -> None:
        for projection in self.projections if self.has_8_bits else ():
            projection.reads_8_bits = reads

    def _within(self, window: int | None, mask_BT: Tensor, places_B: Tensor) -> Tensor:
        """Return the mask with -inf before the window of each row as well."""
        if window is None or mask_BT.shape[1] <= window:
            return mask_BT
        places_T = torch.arange(mask_BT.shape[1], device=self.device)
        return mask_BT.masked_fill(places_T <= places_B[:, None] - window, float("-inf"))

    def embed(self, tokens_N: Tensor) -> Tensor:
        """Return the embeddings of tokens. This waits for the device if the embedding is in CPU memory."""
        embedding = self.decoder.embed_tokens
        hidden_NH = embedding(tokens_N) if self.embeds_on_host else F.embedding(tokens_N, embedding.weight)
        return hidden_NH if self.embedding_scale is None else hidden_NH * self.embedding_scale

    def _angles_at(self, positions_N: Tensor) -> Angles:
        return {
            kind: (cos_TD[positions_N].unsqueeze(1), sin_TD[positions_N].unsqueeze(1))
            for kind, (cos_TD, sin_TD) in self.angles.items()
        }


def reasons_against(model: Any) -> Iterator[str]:
    """Yield the reasons why this forward pass does not compute the same as the model."""
    causal_lm = causal_lm_of(model)
    config, name = causal_lm.config, type(causal_lm).__name__
    family = BY_CLASS.get(name) if type(causal_lm).__module__.startswith("transformers.") else None
    if family is None or not family.decodes:
        yield f"Octet has no forward pass for {name}{'' if family else ', and no plan of its memory'}"
        return
    kinds, blocks = getattr(config, "layer_types", None) or [], causal_lm.get_decoder().layers
    mambas = ["mamba" for block in blocks if getattr(block, "mamba", None) is not None]
    if others := Counter(kind for kind in [*kinds, *mambas] if kind not in (*ATTENTIONS, *MIXERS)):
        yield f"it has layers of another kind ({', '.join(f'{count} x {kind}' for kind, count in others.items())})"
    rope_of = config.rope_parameters
    ropes = [rope_of[kind] for kind in {*kinds} & {*ATTENTIONS}] if has_kinds_of_rope(config) else [rope_of]
    # HunYuan's type is "dynamic", but with `alpha` the angles are constant
    is_constant = getattr(causal_lm.get_decoder().rotary_emb, "rope_type", "") == "ntk_alpha"
    for rope in ropes:
        if rope["rope_type"] not in ROPES and not is_constant:
            yield f"its rope_type is {rope['rope_type']}, not one of {', '.join(ROPES)}"
    window = getattr(config, "sliding_window", None)
    has_windows = any(hasattr(getattr(block, "self_attn", None), "sliding_window") for block in blocks)
    if window and family.windows != "every layer" and not has_windows:
        yield f"its configuration names a sliding window of {window} tokens, which {name} does not have"
    if getattr(config, "enable_moe_block", False) or getattr(blocks[0], "block_sparse_moe", None) is not None:
        yield "its feed-forward layers are mixtures of experts"
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):  # text is causal then
        yield "its attention also looks ahead"
    if getattr(model, "peft_type", "LORA") != "LORA":
        yield f"its adapter is {model.peft_type.value}, not LoRA"
    if not isinstance(causal_lm.get_input_embeddings(), (nn.Embedding, HostEmbedding)):
        yield "its input embedding has an adapter"
    if not all(parameter.numel() for parameter in model.parameters()):
        yield "its weights are split over the ranks"
