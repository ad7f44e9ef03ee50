"""Per-layer inputs, as in small Gemma 4 models: every layer has its own embedding of the tokens."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from trainer.rollout.decoder.layers.norm import Norm
from trainer.rollout.decoder.weights import Projection


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
