"""The output layer of a model, which turns hidden states into logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.model.compact import Int8Head


class Head(NamedTuple):
    """An output layer, with the scale and the soft cap that some model families apply to their logits."""

    layer: Any
    scale: float = 1.0  # Cohere, Granite
    cap: float | None = None  # Gemma 2: logits stay in (-cap, cap)

    def logits_NV(self, hidden_NH: Tensor) -> Tensor:
        return self.finish(self._project(hidden_NH).float())

    def finish(self, projected_NV: Tensor) -> Tensor:
        """Apply scale and cap, in fp32, to what the layer returns."""
        if self.scale != 1.0:
            projected_NV = projected_NV.float() * self.scale
        return projected_NV if self.cap is None else self.cap * torch.tanh(projected_NV.float() / self.cap)

    def _project(self, hidden_NH: Tensor) -> Tensor:
        """Apply the layer. A plain one is not called: ZeRO-3's hooks would gather its weight again, then release it."""
        if type(self.layer) is nn.Linear:
            return nn.functional.linear(hidden_NH, self.layer.weight, self.layer.bias)
        return self.layer(hidden_NH)

    def to_hidden(self, slope_NV: Tensor) -> Tensor:
        """Take a gradient by what the layer returns back to the hidden state."""
        return self.layer.to_hidden(slope_NV) if isinstance(self.layer, Int8Head) else slope_NV @ self.layer.weight


def causal_lm_of(model: Any) -> Any:
    """Return the transformers model, without the adapter's wrapper if it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Head:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(model.get_output_embeddings(), scale / divisor, getattr(config, "final_logit_softcapping", None))
