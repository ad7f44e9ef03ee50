"""A block of a transformer: a mixer, which reads other tokens, and a feed-forward layer, with their norms."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from trainer.model.families import MIXERS, Family
from trainer.rollout.decoder.layers.attention import Attention
from trainer.rollout.decoder.layers.passes import Pass
from trainer.rollout.decoder.layers.recurrent import GatedDelta, ShortConvolution
from trainer.rollout.decoder.weights import Norm, Projection, normed

KINDS: dict[str, Any] = {"conv": ShortConvolution, "linear_attention": GatedDelta}  # all others are attention
# The names of the norms before and after the mixer, then before and after the feed-forward layer.
NORMS = {
    "before": ("input_layernorm", "", "post_attention_layernorm", ""),
    "after": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


class LayerInputs:
    """The per-layer embeddings, added to a projection of the shared embedding."""

    def __init__(self, decoder: Any) -> None:
        self.decoder, self.size = decoder, decoder.hidden_size_per_layer_input
        self.projection = Projection([decoder.per_layer_model_projection])
        self.norm = Norm(decoder.per_layer_projection_norm, adds_one=False)

    def __call__(self, tokens_N: Tensor, hidden_NH: Tensor) -> Tensor:
        embedding = self.decoder.embed_tokens_per_layer
        own_NLp = F.embedding(tokens_N, embedding.weight).unflatten(-1, (-1, self.size))
        shared_NLp = self.projection(hidden_NH) * self.decoder.per_layer_model_projection_scale
        both_NLp = self.norm(shared_NLp.view_as(own_NLp)) + own_NLp * embedding.embed_scale.to(own_NLp.dtype)
        return (both_NLp * self.decoder.per_layer_input_scale).transpose(0, 1).contiguous()


class LayerInput:
    """The layer of a block that gates its per-layer input."""

    def __init__(self, block: Any, index: int) -> None:
        self.index, self.activation = index, block.act_fn
        self.gate, self.out = Projection([block.per_layer_input_gate]), Projection([block.per_layer_projection])
        self.norm = Norm(block.post_per_layer_input_norm, adds_one=False)

    def __call__(self, hidden_NH: Tensor, inputs_LNp: Tensor) -> Tensor:
        return self.norm(self.out(self.activation(self.gate(hidden_NH)) * inputs_LNp[self.index]))


class Block:
    def __init__(self, block: Any, config: Any, index: int, family: Family) -> None:
        kind = (getattr(config, "layer_types", None) or {index: ""})[index]
        mixer = getattr(block, MIXERS.get(kind, "self_attn"))
        self.mixer = KINDS.get(kind, Attention)(mixer, config, index, family)
        mlp = getattr(block, family.part("mlp"))
        self.gate_up = Projection([getattr(mlp, name) for name in family.gates])
        self.down = Projection([getattr(mlp, family.part("down_proj"))])
        self.projections = [*self.mixer.projections, self.gate_up, self.down]
        self.activation = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", getattr(mlp, "activation", F.silu)))
        self.residual_scale = getattr(config, "residual_multiplier", 1.0)
        modules = [getattr(block, family.part(name), None) for name in NORMS[family.norms]]
        norms = [Norm(module, family.adds_one) if hasattr(module, "weight") else None for module in modules]
        self.before_mixer, self.after_mixer, self.before_mlp, self.after_mlp = norms
        self.norms = [norm for norm in (*norms, *getattr(self.mixer, "head_norms", ())) if norm]
        self.scale = getattr(block, "layer_scalar", None)  # Gemma 4
        self.input = LayerInput(block, index) if getattr(block, "hidden_size_per_layer_input", None) else None
        if self.input:
            self.projections += [self.input.gate, self.input.out]

    def __call__(self, hidden_NH: Tensor, at: Pass) -> None:
        """Apply the block to the hidden states in place."""
        self._add(hidden_NH, self.mixer.out, self.mixer(normed(hidden_NH, self.before_mixer), at), self.after_mixer)
        gate, up = self.gate_up(normed(hidden_NH, self.before_mlp)).chunk(2, dim=-1)
        self._add(hidden_NH, self.down, self.activation(gate).mul_(up), self.after_mlp)
        if self.input and at.inputs_LNp is not None:
            hidden_NH.add_(self.input(hidden_NH, at.inputs_LNp))
        if self.scale is not None:
            hidden_NH.mul_(self.scale)

    def _add(self, hidden_NH: Tensor, last: Projection, inner_NH: Tensor, norm: Norm | None) -> None:
        """Add the output of a mixer or feed-forward layer to the hidden states."""
        if norm is None:
            last.add_to(hidden_NH, inner_NH, self.residual_scale)
        else:
            hidden_NH.add_(norm(last(inner_NH)), alpha=self.residual_scale)
