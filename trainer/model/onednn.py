"""Products with frozen fp32 weights on a CPU, by oneDNN where it is faster than torch's MKL.

On AMD's processors MKL does not use AVX-512, and oneDNN takes half of its time. The weight is copied to oneDNN's
layout for each product.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.machine import hardware

LARGE, NARROW = 2**17, 128  # weights and width from which the layout pays; the embedded model has smaller layers
ROWS = 512  # inputs from which it pays
STEP = 128  # inputs are padded to a multiple of this, because oneDNN keeps memory for every number that it has seen


def linear(x_NH: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return what `F.linear` returns, up to rounding."""
    is_large = weight_OH.numel() >= LARGE and min(weight_OH.shape) >= NARROW and len(x_NH) >= ROWS
    if not is_large or weight_OH.dtype != torch.float32 or not _gains(x_NH.device):
        return F.linear(x_NH, weight_OH, bias_O)
    padded = F.pad(x_NH, (0, 0, 0, -len(x_NH) % STEP))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OH, len(padded))
    bias_O = None if bias_O is None else bias_O.contiguous()
    return torch.ops.mkldnn._linear_pointwise(padded, packed, bias_O, "none", [], "")[: len(x_NH)]


@cache
def _gains(device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return hardware.is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"
