"""The fused kernels of CUDA for attention and norms, in plain operations: the CPU does not have them by these names."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> list[Tensor]:
    """Return the first result. The others serve the backward pass, which works them out again here."""
    weights = _scores(q, _repeated(k, q), bias, causal, scale).softmax(-1).nan_to_num(0.0)
    return [(weights @ _repeated(v, q).float()).to(q.dtype)]


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> list[Tensor]:
    """Return the gradients of queries, keys and values."""
    keys, values = _repeated(k, q).float(), _repeated(v, q).float()
    weights = _scores(q, keys, bias, causal, scale).softmax(-1).nan_to_num(0.0)
    of_weights = grad.float() @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * _scale(q, scale)
    of_q, of_k = of_scores @ keys, of_scores.transpose(-1, -2) @ q.float()
    of_v = weights.transpose(-1, -2) @ grad.float()
    return [of_q.to(q.dtype), _summed(of_k, k), _summed(of_v, v)]


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    scores = q.float() @ k.float().transpose(-1, -2) * _scale(q, scale)
    if bias is not None:
        scores = scores + bias.float()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return scores


def _repeated(heads: Tensor, q: Tensor) -> Tensor:
    """Repeat grouped keys or values for each query head."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)


def _summed(gradient: Tensor, heads: Tensor) -> Tensor:
    return gradient.unflatten(1, (heads.shape[1], -1)).sum(2).to(heads.dtype)


# The signatures are those of the operations.


def _flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    return attend(q, k, v, None, is_causal, scale)


def _flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout_p, is_causal, seed, offset, *, scale=None):
    return attend_backward(grad, q, k, v, None, is_causal, scale)


def _efficient(q, k, v, bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, *, scale=None):
    return attend(q, k, v, bias, is_causal, scale)


def _efficient_backward(
    grad, q, k, v, bias, out, lse, seed, offset, dropout_p, grad_input_mask, is_causal=False, *, scale=None
):
    return attend_backward(grad, q, k, v, bias, is_causal, scale)


def _rms_norm_backward(grad, hidden, shape, rstd, weight, output_mask):
    """Return the gradients of the input and, where it is wanted, of the weight."""
    normed = hidden.float() * rstd
    of_normed = grad.float() if weight is None else grad.float() * weight.float()
    of_input = (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) * rstd
    of_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    return [part.to(hidden.dtype) for part, wanted in zip((of_input, of_weight), output_mask) if wanted]


KERNELS: dict[str, Callable[..., list[Tensor]]] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
}
