"""The output layer of a model: from hidden states to logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Head(NamedTuple):
    """The output layer with what some families do to its logits."""

    layer: Any
    scale: float = 1.0  # Cohere, Granite
    cap: float | None = None  # Gemma 2: logits never leave (-cap, cap)

    def logits_NV(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = self._project(hidden_NH).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)

    def _project(self, hidden_NH: Tensor) -> Tensor:
        """A plain layer is not called: under ZeRO-3 its hooks would gather it again, and let go of it afterwards."""
        if type(self.layer) is nn.Linear:
            return nn.functional.linear(hidden_NH, self.layer.weight, self.layer.bias)
        return self.layer(hidden_NH)


def causal_lm_of(model: Any) -> Any:
    """The transformers model, under an adapter or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Head:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(model.get_output_embeddings(), scale / divisor, getattr(config, "final_logit_softcapping", None))
