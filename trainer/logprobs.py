"""loss: log-probs and entropy of the completion tokens, chunk by chunk.

The logits are the memory line of a consumer card: 151,936 entries a token in fp32 are 0.6 MB, and log-softmax with its
gradient makes three copies. Here only completion tokens go through the output layer, a chunk at a time, and the
backward pass computes the chunk's logits again instead of keeping them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.errors import ModelError
from trainer.types import TrainingBatch

CHUNK_BYTES = 64 * 2**20  # of fp32 logits alive at once


class Scores(NamedTuple):
    """Aligned to the targets of a batch, 0 outside its mask. The entropy carries no gradient."""

    logprobs_BT: Tensor
    entropy_BT: Tensor


class LogProbs(nn.Module):
    """A causal language model as the training step sees it: a batch in, log-probs and entropies out."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        _refuse_unusual_head(self._causal_lm().config)

    def _causal_lm(self) -> Any:
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(self, batch: TrainingBatch) -> Scores:
        causal_lm = self._causal_lm()
        backbone, head = causal_lm.get_decoder(), causal_lm.get_output_embeddings()
        hidden_BTH = backbone(batch.inputs_BT, use_cache=False).last_hidden_state
        logprobs_N, entropy_N = chunked(
            head, hidden_BTH[batch.mask_BT], batch.targets_BT[batch.mask_BT], self.temperature
        )
        return Scores(_spread(logprobs_N, batch.mask_BT), _spread(entropy_N, batch.mask_BT))


def chunked(head: Any, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, without a [tokens, vocabulary] tensor alive."""
    rows = max(1, CHUNK_BYTES // (4 * head.weight.shape[0]))
    if len(targets_N) <= rows:
        return token_logprobs(head, hidden_NH, targets_N, temperature)
    pieces = [
        checkpoint(token_logprobs, head, hidden, targets, temperature, use_reentrant=False)
        for hidden, targets in zip(hidden_NH.split(rows), targets_N.split(rows))
    ]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat([entropy for _, entropy in pieces])


def token_logprobs(head: nn.Module, hidden_NH: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits_NV = head(hidden_NH).float() / temperature
    normaliser_N = logits_NV.logsumexp(dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - normaliser_N
    with torch.no_grad():
        expected_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(dim=-1)
        entropy_N = normaliser_N - expected_N
    return logprobs_N, entropy_N


def _spread(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=mask_BT.device).masked_scatter(mask_BT, values_N)


def _refuse_unusual_head(config: Any) -> None:
    """Heads that scale or cap their logits would be scored wrongly: better to say so."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            kind = getattr(config, "model_type", "this model")
            raise ModelError(f"model.name: {kind} changes its logits by `{name}`, which Octet does not support yet.")
