"""Products with frozen fp32 weights on a CPU, by oneDNN where it is faster than torch's MKL.

On AMD's processors MKL does not use AVX-512, and oneDNN takes half of its time. The weight is copied to oneDNN's
layout for each product, which takes 2 to 15 % of the time of the product and keeps no memory.
"""

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from trainer.machine import hardware

LARGE = 2**17  # number of weights from which the layout pays; no layer of the embedded model has as many
ROWS = 256  # number of inputs from which it pays


def linear(x_NH: Tensor, weight_OH: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return what `F.linear` returns, up to rounding."""
    is_large = len(x_NH) >= ROWS and weight_OH.numel() >= LARGE
    if not is_large or weight_OH.dtype != torch.float32 or not _gains(x_NH.device):
        return F.linear(x_NH, weight_OH, bias_O)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OH, len(x_NH))
    return torch.ops.mkldnn._linear_pointwise(x_NH, packed, bias_O, "none", [], "")


@cache
def _gains(device: torch.device) -> bool:
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return hardware.is_amd() and torch.backends.cpu.get_cpu_capability() == "AVX512"
