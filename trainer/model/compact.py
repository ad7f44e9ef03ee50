"""The embedding of a frozen base in CPU memory, and its output layer in 8 bits.

In a 7 B model with 4-bit layers these two are 2.2 of 5.6 GB. A model whose output layer is its embedding needs the
weight on the card anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.config.settings import Model
from trainer.errors import ModelError

ROWS = 8192  # of the output layer that are in model.dtype at a time


def compact(model: Any, settings: Model) -> None:
    """Replace the embedding and the output layer as the settings say."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = [f"model.embeddings={settings.embeddings}"] if settings.embeddings == "cpu" else []
    wanted += [f"model.quantize_head={settings.quantize_head}"] if settings.quantize_head != "none" else []
    if not wanted:
        return
    if embedding.weight is head.weight or type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise ModelError(
            wanted[0],
            f"the embedding and the output layer of {settings.name} are one weight, or of a kind of their own, so "
            "there is nothing to gain",
            "Leave the setting out",
        )
    if settings.embeddings == "cpu":
        model.set_input_embeddings(HostEmbedding(embedding.weight))
    if settings.quantize_head == "int8":
        model.set_output_embeddings(Int8Head(head))


class HostEmbedding(nn.Module):
    """An embedding that looks its rows up in CPU memory and sends them to the device of the tokens.

    The weight is no parameter, so that it stays where it is when the model is moved.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.detach().cpu()

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens.cpu(), self.weight).to(tokens.device)


class Int8Head(nn.Module):
    """A frozen output layer with 8 bits a weight and a factor for each row of the vocabulary."""

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
        """Take a gradient by the logits back to the hidden state."""
        scaled = (slope_NV * self.factor_V).to(slope_NV.dtype).split(ROWS, dim=-1)
        codes = self.codes_VH.split(ROWS)
        return torch.stack([part @ rows.to(part.dtype) for part, rows in zip(scaled, codes, strict=True)]).sum(dim=0)
