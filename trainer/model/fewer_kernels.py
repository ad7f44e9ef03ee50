"""Replace norms and rotary embeddings of transformers by versions with fewer kernels, because launching a kernel costs
more than its work. These round to 16 bits once, those of transformers after each operation."""

import sys
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.model.families import BY_CLASS

ROTATE = "apply_rotary_pos_emb"  # the name of the function in the module of each family


def use_fewer_kernels(causal_lm: Any) -> None:
    """Replace the RMS norms and the rotary embedding of a model on a card whose family Octet knows."""
    family = BY_CLASS.get(type(causal_lm).__name__)
    if causal_lm.device.type != "cuda" or family is None or family.adds_one:
        return
    for part in causal_lm.modules():
        if type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon"):
            part.forward = MethodType(_norm, part)
    module = sys.modules[type(causal_lm).__module__]
    if _turns_halves(vars(module).get(ROTATE), causal_lm.device):
        setattr(module, ROTATE, rotate)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Return queries and keys with their rotary embedding, like the function of transformers."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotated.apply(q, cos, sin), _Rotated.apply(k, cos, sin)


class _Rotated(torch.autograd.Function):
    """Rotates the pairs that the two halves of each head form."""

    @staticmethod
    def forward(context: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        context.save_for_backward(cos, sin)
        first, second = sin.chunk(2, dim=-1)
        return _turned(heads, cos, first, second)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = context.saved_tensors
        first, second = sin.chunk(2, dim=-1)
        return _turned(gradient, cos, second, first, back=True), None, None


def _turned(heads: Tensor, cos: Tensor, first: Tensor, second: Tensor, back: bool = False) -> Tensor:
    part, rest = heads.tensor_split([cos.shape[-1]], dim=-1)  # Phi-4-mini rotates only the first part of each head
    sign, turned = 1 if back else -1, part * cos
    for half, other, sine, factor in zip(turned.chunk(2, -1), part.chunk(2, -1)[::-1], (first, second), (sign, -sign)):
        half.addcmul_(other, sine, value=factor)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


@torch.no_grad()
def _turns_halves(function: Any, device: torch.device) -> bool:
    """Return True if a function rotates like `rotate`. Those of some families pair neighbours."""
    q, k = (torch.randn(1, heads, 2, 8, device=device) for heads in (2, 1))
    angles = torch.randn(1, 2, 4, device=device).repeat(1, 1, 2)
    try:
        pairs = zip(function(q, k, angles.cos(), angles.sin()), rotate(q, k, angles.cos(), angles.sin()), strict=True)
        return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
    except (TypeError, RuntimeError):  # it does not exist, or has other parameters
        return False
