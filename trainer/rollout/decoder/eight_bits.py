"""Weights in 8 bits for decode steps, whose time is spent on reading the weights.

A weight has a scale for each output. The inputs are also rounded, with a scale for each row, so that an answer does not
depend on other rows. int8 has equal steps; fp8 (e4m3) is a float with 3 bits of mantissa. Cards multiply fp8 from
compute capability 8.9 on, and scale the result within the matmul.
"""

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.errors import ConfigError
from trainer.plan.planner import EIGHT_BITS_MULTIPLE

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
FP8_CAPABILITY = (8, 9)
LEAST_ROWS = 32  # inputs of an int8 product on a card are padded to this; it needs more than 16 rows
AT_ONCE = 8192  # outputs of a weight that are rounded at a time, to bound the memory for fp32 values


class EightBits(NamedTuple):
    """The weight of one linear layer in 8 bits, or of several layers with the same input."""

    codes_OH: Tensor
    scale_1O: Tensor
    bias_O: Tensor | None

    def product(self, hidden_NH: Tensor) -> Tensor:
        codes_NH, scale_N1 = rounded(hidden_NH, self.codes_OH.dtype)
        weight_HO, rows = self.codes_OH.t(), len(hidden_NH)
        if self.codes_OH.dtype == torch.float8_e4m3fn:
            dtype = torch.bfloat16  # the only result that cards support with row scales
            bias_O = None if self.bias_O is None else self.bias_O.to(dtype)
            product_NO = torch._scaled_mm(codes_NH, weight_HO, scale_N1, self.scale_1O, bias_O, out_dtype=dtype)
            return product_NO.to(hidden_NH.dtype)
        if codes_NH.is_cuda and rows < LEAST_ROWS:
            codes_NH = F.pad(codes_NH, (0, 0, 0, LEAST_ROWS - rows))
        product_NO = hidden_NH.new_empty(rows, len(self.codes_OH))
        torch.mul(torch._int_mm(codes_NH, weight_HO)[:rows], self.scale_1O, out=product_NO).mul_(scale_N1)
        return product_NO if self.bias_O is None else product_NO.add_(self.bias_O)


def rounded(values_NX: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values in 8 bits, and the scale of each row."""
    largest_N1 = torch.linalg.vector_norm(values_NX, inf, dim=1, keepdim=True, dtype=torch.float32)
    scale_N1 = largest_N1.clamp_(min=1e-12).div_(LARGEST[dtype])
    if dtype == torch.int8:
        return (values_NX / scale_N1).round_().to(dtype), scale_N1
    codes_NX = torch.empty_like(values_NX, dtype=dtype)
    torch.div(values_NX, scale_N1, out=codes_NX)
    return codes_NX, scale_N1


def in_8_bits(layers: Sequence[Any], dtype: torch.dtype) -> EightBits | None:
    """Return the joined weights of frozen linear layers, or None if 8-bit products do not support their sizes."""
    outputs = sum(layer.out_features for layer in layers)
    if layers[0].in_features % EIGHT_BITS_MULTIPLE or outputs % EIGHT_BITS_MULTIPLE:
        return None
    parts = [rounded(part, dtype) for layer in layers for part in layer.weight.detach().split(AT_ONCE)]
    codes, scales = zip(*parts, strict=True)
    biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    has_bias = any(layer.bias is not None for layer in layers)
    return EightBits(torch.cat(codes), torch.cat(scales).t().contiguous(), torch.cat(biases) if has_bias else None)


def check_card(kind: str, device: torch.device) -> None:
    """Raise ConfigError on a card that does not multiply numbers of this kind."""
    if kind != "fp8" or device.type != "cuda":
        return
    if (capability := torch.cuda.get_device_capability(device)) < FP8_CAPABILITY:
        reason = f"this card has compute capability {capability[0]}.{capability[1]}, and fp8 needs 8.9"
        raise ConfigError("rollout.weights=fp8", reason, "Write rollout.weights=int8")
