"""loss: log-probs and entropy of the completion tokens, chunk by chunk.

The logits are the memory line of a consumer card: 151,936 entries a token in fp32 are 0.6 MB, and log-softmax with its
gradient makes three copies. Here only completion tokens go through the output layer, a chunk at a time, and the
backward pass computes the chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ModelError
from trainer.flat import last_hidden, make_flat
from trainer.types import TrainingBatch

CHUNK_BYTES = 64 * 2**20  # of fp32 logits alive at once


class Scores(NamedTuple):
    """Aligned to the targets of a batch, 0 outside its mask. The entropy has a gradient only if asked."""

    logprobs_BT: Tensor
    entropy_BT: Tensor


class LogProbs(nn.Module):
    """A causal language model as the training step sees it: a batch in, log-probs and entropies out."""

    def __init__(self, model: Any, temperature: float, train_entropy: bool = False, flat: bool = True) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.train_entropy = train_entropy
        self.is_flat = flat and make_flat(causal_lm_of(model))
        _refuse_unknown_head(self.backbone, self.head, causal_lm_of(model))

    @property
    def backbone(self) -> Any:
        return causal_lm_of(self.model).get_decoder()

    @property
    def head(self) -> Head:
        return head_of(causal_lm_of(self.model))

    def forward(self, batch: TrainingBatch) -> Scores:
        return Scores(*(self._from_line(batch) if self.is_flat else self._from_rows(batch)))

    def _from_line(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_EH, targets_E = last_hidden(self.backbone, batch), batch.targets_BT.flatten()[batch.tree.edge_E]
        for values_E in chunked(self.head, hidden_EH, targets_E, self.temperature, self.train_entropy):
            yield values_E[batch.tree.edge_BT].where(batch.mask_BT, 0.0)

    def _from_rows(self, batch: TrainingBatch) -> Iterator[Tensor]:
        hidden_BTH = self.backbone(batch.inputs_BT, use_cache=False).last_hidden_state
        hidden_NH, targets_N = hidden_BTH[batch.mask_BT], batch.targets_BT[batch.mask_BT]
        for values_N in chunked(self.head, hidden_NH, targets_N, self.temperature, self.train_entropy):
            yield torch.zeros_like(batch.mask_BT, dtype=values_N.dtype).masked_scatter(batch.mask_BT, values_N)


class Head(NamedTuple):
    """The output layer with what some families do to its logits."""

    layer: Any
    scale: float = 1.0  # Cohere, Granite
    cap: float | None = None  # Gemma 2: logits never leave (-cap, cap)

    def logits_NV(self, hidden_NH: Tensor) -> Tensor:
        logits_NV = self.layer(hidden_NH).float()
        if self.scale != 1.0:
            logits_NV = logits_NV * self.scale
        return logits_NV if self.cap is None else self.cap * torch.tanh(logits_NV / self.cap)


def causal_lm_of(model: Any) -> Any:
    """The transformers model, under an adapter or not."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def head_of(model: Any) -> Head:
    config = model.config.get_text_config()
    scale = getattr(config, "logit_scale", None) or 1.0
    divisor = getattr(config, "logits_scaling", None) or 1.0
    return Head(model.get_output_embeddings(), scale / divisor, getattr(config, "final_logit_softcapping", None))


def chunked(
    head: Head, hidden_NH: Tensor, targets_N: Tensor, temperature: float, train_entropy: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, without a [tokens, vocabulary] tensor alive."""
    rows = max(1, CHUNK_BYTES // (4 * head.layer.weight.shape[0]))
    if len(targets_N) <= rows:
        return token_logprobs(head, hidden_NH, targets_N, temperature, train_entropy)
    pieces = [
        checkpoint(token_logprobs, head, hidden, targets, temperature, train_entropy, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(rows), targets_N.split(rows))
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def token_logprobs(
    head: Head, hidden_NH: Tensor, targets_N: Tensor, temperature: float, train_entropy: bool
) -> tuple[Tensor, Tensor]:
    logits_NV = head.logits_NV(hidden_NH) / temperature
    normaliser_N = logits_NV.logsumexp(dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - normaliser_N
    with nullcontext() if train_entropy else torch.no_grad():
        expected_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(dim=-1)
        entropy_N = normaliser_N - expected_N
    return logprobs_N, entropy_N


@torch.no_grad()
def _refuse_unknown_head(backbone: Any, head: Head, model: Any) -> None:
    """Eight tokens through the model and through its parts: a family that does more to its logits is scored wrongly."""
    tokens_1T = torch.arange(8, device=model.device)[None] % head.layer.weight.shape[0]
    logits_NV = head.logits_NV(backbone(tokens_1T, use_cache=False).last_hidden_state[0])
    expected_NV = model(tokens_1T, use_cache=False).logits[0].float()
    if (logits_NV - expected_NV).abs().max() > 0.02 * expected_NV.abs().max().clamp(min=1.0):  # bf16 rounds to 0.4 %
        raise ModelError(
            f"model.name: {model.config.model_type} does more to its logits than Octet knows of, so their "
            "probabilities would be wrong. Known are a factor (logit_scale, logits_scaling) and a soft cap "
            "(final_logit_softcapping). Choose another model family."
        )
