"""loss: log-probs and entropies of the completion tokens, chunk by chunk.

Logits decide how much fits on a consumer card: 151,936 entries per token in fp32 are 0.6 MB, and log-softmax with its
gradient makes three copies. Here only completion tokens go through the output layer, one chunk at a time. The log-prob
of a token depends only on its hidden state, so the gradient with respect to the hidden state is computed while the
logits exist, and the backward pass needs only this vector for each token. If the output layer is also trained, the
backward pass computes the logits of a chunk again instead.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from trainer.errors import ModelError
from trainer.loss.shared_prefix import last_hidden, make_flat
from trainer.model.embedding_and_head import Head, causal_lm_of, head_of
from trainer.model.shapes import CHUNK_BYTES
from trainer.records import Scores, TrainingBatch


class LogProbs(nn.Module):
    """Wraps a causal language model for training: it takes a batch, and returns log-probs and entropies."""

    def __init__(
        self, model: Any, temperature: float, train_entropy: bool = False, flat: bool = True, offload: bool = False
    ) -> None:
        super().__init__()
        causal_lm = causal_lm_of(model)
        if reason := _reason_against(causal_lm, head_of(causal_lm)):
            raise ModelError(f"model.name={causal_lm.name_or_path}", reason, "Choose another model family")
        self.model = model
        self.offload = offload
        self.is_flat = flat and make_flat(causal_lm)
        self.output = Output(head_of(causal_lm), temperature, train_entropy)

    def forward(self, batch: TrainingBatch) -> Scores:
        mask_BT, edge_E, backbone = batch.mask_BT, batch.tree.edge_E, causal_lm_of(self.model).get_decoder()
        # with gradient checkpointing, the inputs of the layers are saved for the backward pass
        with save_on_cpu(pin_memory=True) if self.offload else nullcontext():
            if self.is_flat:
                hidden_EH = last_hidden(backbone, batch)
            else:
                hidden_BTH = backbone(batch.inputs_BT, use_cache=False).last_hidden_state
        if self.is_flat:
            scores = self.output(hidden_EH, batch.targets_BT.flatten()[edge_E])
            return Scores(*(values_E[batch.tree.edge_BT].where(mask_BT, 0.0) for values_E in scores))
        scores = self.output(hidden_BTH[mask_BT], batch.targets_BT[mask_BT])
        return Scores(*(torch.zeros_like(mask_BT, dtype=one.dtype).masked_scatter(mask_BT, one) for one in scores))


class Output(nn.Module):
    """Returns the log-prob of each target and the entropy of its distribution, without all logits in memory at once.
    The weight is also a parameter of this module, so that ZeRO-3 gathers it once and not per chunk, because the ranks
    differ in their number of chunks."""

    def __init__(self, head: Head, temperature: float, train_entropy: bool = False) -> None:
        super().__init__()
        self.head = head
        self.weight, self.bias = getattr(head.layer, "weight", None), head.layer.bias
        self.temperature = temperature
        self.train_entropy = train_entropy

    def forward(self, hidden_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        options = self.temperature, self.train_entropy
        if not any(parameter.requires_grad for parameter in self.head.layer.parameters()):
            return _FrozenHead.apply(hidden_NH, targets_N, self.head, *options)
        pieces = [
            checkpoint(token_logprobs, self.head, *chunk, *options, use_reentrant=False)
            for chunk in _chunks(self.head, hidden_NH, targets_N)
        ]
        logprobs, entropies = zip(*pieces, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)


def _chunks(head: Head, hidden_NH: Tensor, targets_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    rows = max(1, CHUNK_BYTES // (4 * head.layer.out_features))  # not the shape of the weight, which ZeRO-3 may split
    return zip(hidden_NH.split(rows), targets_N.split(rows))


def token_logprobs(
    head: Head, hidden_NH: Tensor, targets_N: Tensor, temperature: float, train_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each target, and the entropy of its distribution."""
    logits_NV = head.logits_NV(hidden_NH) / temperature
    normaliser_N = logits_NV.logsumexp(dim=-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None])[:, 0] - normaliser_N
    with nullcontext() if train_entropy else torch.no_grad():
        expected_N = ((logits_NV - normaliser_N[:, None]).exp() * logits_NV).sum(dim=-1)
        entropy_N = normaliser_N - expected_N
    return logprobs_N, entropy_N


class _FrozenHead(torch.autograd.Function):
    """Computes values and gradients in one pass over the logits, with two matrix products and no recomputation."""

    @staticmethod
    def forward(
        context: Any, hidden_NH: Tensor, targets_N: Tensor, head: Head, temperature: float, train_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        wanted = (context.needs_input_grad[0], context.needs_input_grad[0] and train_entropy)
        pieces = [_score_chunk(head, *chunk, temperature, *wanted) for chunk in _chunks(head, hidden_NH, targets_N)]
        logprobs_N, entropy_N, *slopes = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        context.save_for_backward(*slopes)
        if not train_entropy:
            context.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(context: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        parts = [
            (gradient_N[:, None] * slope_NH).to(slope_NH.dtype)
            for gradient_N, slope_NH in zip(upstream, context.saved_tensors)
        ]
        return sum(parts[1:], parts[0]), None, None, None, None


def _score_chunk(
    head: Head, hidden_NH: Tensor, targets_N: Tensor, temperature: float, wants_slope: bool, wants_entropy_slope: bool
) -> tuple[Tensor, ...]:
    """Return log-probs and entropies of a chunk and, if wanted, their gradients with respect to the hidden states."""
    logits_NV = head.logits_NV(hidden_NH)
    cap_slope_NV = None if head.cap is None else 1 - (logits_NV / head.cap).square()  # the derivative of the soft cap
    logits_NV.div_(temperature)
    normaliser_N1 = logits_NV.logsumexp(dim=-1, keepdim=True)
    chosen_N1 = logits_NV.gather(-1, targets_N[:, None])
    probabilities_NV = (logits_NV - normaliser_N1).exp_()
    entropy_N1 = normaliser_N1 - torch.linalg.vecdot(probabilities_NV, logits_NV)[:, None]
    results = [(chosen_N1 - normaliser_N1)[:, 0], entropy_N1[:, 0]]

    def through_the_head(slope_NV: Tensor) -> Tensor:
        """Return the gradient by the hidden states, given the one by the logits after the temperature."""
        slope_NV = slope_NV if cap_slope_NV is None else slope_NV * cap_slope_NV
        return head.to_hidden(slope_NV.to(hidden_NH.dtype)) * (head.scale / temperature)

    entropy_slope_NV = None
    if wants_entropy_slope:
        entropy_slope_NV = (logits_NV - normaliser_N1).add_(entropy_N1).mul_(probabilities_NV).neg_()
    if wants_slope:
        slope_NV = probabilities_NV.neg_().scatter_add_(-1, targets_N[:, None], torch.ones_like(chosen_N1))
        results.append(through_the_head(slope_NV))
    if entropy_slope_NV is not None:
        results.append(through_the_head(entropy_slope_NV))
    return tuple(results)


@torch.no_grad()
def _reason_against(model: Any, head: Head) -> str:
    """Return why a model cannot be trained; "" if it can. It cannot if it computes different results in training mode
    and in eval mode, in which answers are sampled, or if its logits differ from those of its backbone and `head`, in a
    family that transforms them in an unknown way. The random generators are left as they were."""
    backbone, was_training, family = model.get_decoder(), model.training, model.config.model_type
    if backbone is model.get_output_embeddings():  # as in ModernBERT, which has more layers before it
        return f"the decoder of {family} is its output layer"
    tokens_1T = torch.arange(16, device=model.device)[None] % head.layer.out_features
    rounding = 1e-4 if model.dtype == torch.float32 else 0.02  # bf16 rounds to 0.4 %
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        noisy_1TH = backbone.train()(tokens_1T, use_cache=False).last_hidden_state
        hidden_1TH = backbone.eval()(tokens_1T, use_cache=False).last_hidden_state
        differs = (noisy_1TH - hidden_1TH).abs().max() > rounding * hidden_1TH.abs().max()
        expected_NV = model(tokens_1T, use_cache=False).logits[0].float()
    backbone.train(was_training)
    if differs:
        return f"{family} computes something else in training than in sampling, by noise that stays"
    logits_NV = head.logits_NV(hidden_1TH[0])
    limit = 0.02 * expected_NV.abs().max().clamp(min=1.0)  # bf16 rounds to 0.4 %
    if logits_NV.shape != expected_NV.shape or (logits_NV - expected_NV).abs().max() > limit:
        return f"{family} does more to its logits than logit_scale, logits_scaling and a soft cap"
    return ""
