"""RMS norms."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F


class Norm:
    """An RMS norm. Gemma stores the weight minus 1; the sum is kept at one address, for captured steps."""

    def __init__(self, norm: Any, adds_one: bool) -> None:
        self.norm, self.adds_one = norm, adds_one
        self.epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        self.weight = norm.weight.float() + 1 if self.adds_one else norm.weight

    def refresh(self) -> None:
        if self.adds_one:
            self.weight.copy_(self.norm.weight).add_(1)
        else:
            self.weight = self.norm.weight

    def __call__(self, hidden: Tensor) -> Tensor:
        exact = hidden.to(self.weight.dtype)  # fp32 where 1 is added, because bf16 would round the sum
        return F.rms_norm(exact, self.weight.shape, self.weight, self.epsilon).to(hidden.dtype)


def normed(hidden_NH: Tensor, norm: Norm | None) -> Tensor:
    return hidden_NH if norm is None else norm(hidden_NH)
