"""The two ends of a model: its embedding, and its output layer, which turns hidden states into logits.

The embedding of a frozen base can be kept in CPU memory, and its output layer in 8 bits: together they are 2.2 of the
5.6 GB of a 7 B model in 4 bits. A model whose output layer is its embedding needs the weight on the card anyway.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.settings import Model
from trainer.errors import ModelError

ROWS = 8192  # rows of the output layer that are converted to model.dtype at a time


def compact(model: Any, settings: Model) -> None:
    """Replace the embedding and the output layer as the settings say."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    written = [f"model.embeddings={settings.embeddings}"] if settings.embeddings == "cpu" else []
    written += [f"model.quantize_head={settings.quantize_head}"] if settings.quantize_head != "none" else []
    if not written:
        return
    if embedding.weight is head.weight or type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        reason = f"the embedding and the output layer of {settings.name} share a weight, or are of a special class"
        raise ModelError(written[0], reason, "Leave the setting out")
    if settings.embeddings == "cpu":
        model.set_input_embeddings(HostEmbedding(embedding.weight))
    if settings.quantize_head == "int8":
        model.set_output_embeddings(Int8Head(head))


class HostEmbedding(nn.Module):
    """An embedding that looks up its rows in CPU memory and sends them to the device of the tokens. The weight is not a
    parameter, so it stays in CPU memory when the model is moved."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.detach().cpu()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.cpu(), self.weight).to(tokens.device)


class Int8Head(nn.Module):
    """A frozen output layer with 8 bits for each weight and a factor for each token of the vocabulary."""

    codes_VH: Tensor
    factor_V: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        largest_V1 = head.weight.detach().abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12)
        codes = [
            (rows.float() * (127 / largest)).round_().to(torch.int8)
            for rows, largest in zip(head.weight.detach().split(ROWS), largest_V1.split(ROWS), strict=True)
        ]
        self.register_buffer("codes_VH", torch.cat(codes), persistent=False)
        self.register_buffer("factor_V", largest_V1[:, 0] / 127, persistent=False)
        self.bias = head.bias
        self.in_features, self.out_features = head.in_features, head.out_features

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [F.linear(hidden, codes.to(hidden.dtype)) for codes in self.codes_VH.split(ROWS)]
        logits = (torch.cat(parts, dim=-1) * self.factor_V).to(hidden.dtype)
        return logits if self.bias is None else logits + self.bias

    def to_hidden(self, slope_NV: Tensor) -> Tensor:
        """Return the gradient of the hidden states, given that of the logits."""
        scaled = (slope_NV * self.factor_V).to(slope_NV.dtype).split(ROWS, dim=-1)
        codes = self.codes_VH.split(ROWS)
        return torch.stack([part @ rows.to(part.dtype) for part, rows in zip(scaled, codes, strict=True)]).sum(dim=0)


class Head(NamedTuple):
    """An output layer with the scale and the soft cap that some model families apply to their logits."""

    layer: Any
    scale: float = 1.0  # Cohere, Granite
    cap: float | None = None  # Gemma 2: logits stay in (-cap, cap)

    def logits_NV(self, hidden_NH: Tensor) -> Tensor:
        # A plain layer is not called, because ZeRO-3's hooks would gather its weight again, then release it.
        plain = (self.layer.weight, self.layer.bias) if type(self.layer) is nn.Linear else None
        return self.finish((F.linear(hidden_NH, *plain) if plain else self.layer(hidden_NH)).float())

    def finish(self, projected_NV: Tensor) -> Tensor:
        """Apply scale and cap in fp32 to the output of the layer."""
        if self.scale != 1.0:
            projected_NV = projected_NV.float() * self.scale
        return projected_NV if self.cap is None else self.cap * torch.tanh(projected_NV.float() / self.cap)

    def to_hidden(self, slope_NV: Tensor) -> Tensor:
        """Return the gradient of the hidden states, given that of the layer's output."""
        return self.layer.to_hidden(slope_NV) if isinstance(self.layer, Int8Head) else slope_NV @ self.layer.weight


def causal_lm_of(model: Any) -> Any:
    """Return the transformers model, without the adapter's wrapper if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Head:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(model.get_output_embeddings(), scale / divisor, getattr(config, "final_logit_softcapping", None))
