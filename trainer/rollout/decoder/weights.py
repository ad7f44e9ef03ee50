"""The norms and linear layers for sampling: merged copies of the weights where they fit, else the layers themselves.

The overhead of a call outweighs a small matmul, so a copy joins layers with the same input (q, k and v; gate and up),
and includes the adapter. The base model itself is never written to, because it would drift if an adapter were merged
and unmerged in every step. On a card, where a copy does not fit, the adapters of the layers are joined instead. Layers
that cannot be copied (4-bit weights, DoRA) are called directly.

On a CPU, copies of large fp32 layers have oneDNN's layout, whose products take 40 to 90 % of the time of `F.linear`,
with relative errors of 1e-6 instead of 4e-7. The layers of the embedded model are smaller than that. Copies of bf16
layers have this layout, too, and their adapters stay separate, in fp32.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainer.machine import hardware
from trainer.model.fast_lora import LowRank
from trainer.model.lora import ADAPTER
from trainer.model.onednn import LARGE
from trainer.model.quantised import Bf16Linear
from trainer.plan.planner import SPARE
from trainer.rollout.decoder.eight_bits import EightBits, in_8_bits
from trainer.rollout.limits import free_bytes

ROWS = 64  # number of input rows for which oneDNN chooses the layout


class Norm:
    """An RMS norm. Gemma stores the weight minus 1; the sum is kept at one address, for captured steps."""

    def __init__(self, norm: Any, adds_one: bool) -> None:
        self.norm, self.adds_one = norm, adds_one
        self.epsilon = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        self.weight = norm.weight.float() + 1 if self.adds_one else norm.weight

    def refresh(self) -> None:
        """Read the current weight again if 1 is added to it; other norms read the weight itself."""
        if self.adds_one:
            self.weight.copy_(self.norm.weight).add_(1)

    def __call__(self, hidden: Tensor) -> Tensor:
        exact = hidden.to(self.weight.dtype)  # fp32 where 1 is added, because bf16 would round the sum
        return F.rms_norm(exact, self.weight.shape, self.weight, self.epsilon).to(hidden.dtype)


def normed(hidden_NH: Tensor, norm: Norm | None) -> Tensor:
    return hidden_NH if norm is None else norm(hidden_NH)


class Projection:
    """Linear layers of the model that read the same input, as one layer. They may have adapters."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers, self.bases = layers, [*map(_base, layers)]
        self.adapted = any(map(_is_adapted, layers))
        self.bytes = sum(base.weight.nbytes for base in self.bases if hasattr(base, "weight"))  # an 8-bit head has none
        self._is_bf16 = all(isinstance(base, Bf16Linear) for base in self.bases)
        self._copy_OH: Tensor | None = None
        self._bias_O: Tensor | None = None
        self._factors: tuple[Tensor, Tensor] | None = None  # the A of all layers stacked, and a block diagonal of the B
        self._in_8_bits: EightBits | None = None
        self.reads_8_bits = False

    @property
    def gains_from_a_copy(self) -> bool:
        if not all(map(_can_be_copied, self.layers)):
            return False
        if self._is_bf16:
            return self.is_packed and len({*map(_is_adapted, self.layers)}) == 1
        return self.adapted or len(self.layers) > 1 or self.is_packed

    @property
    def is_packed(self) -> bool:
        """True if a copy has oneDNN's layout."""
        weight = self.bases[0].weight
        is_large = weight.dtype == torch.float32 and self.bytes >= 4 * LARGE
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        return is_large or (self._is_bf16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())  # AVX2 alone is too little

    def allocate_copy(self) -> None:
        self._copy_OH = torch.cat([base.weight for base in self.bases])
        if any(base.bias is not None for base in self.bases):
            self._bias_O = self._copy_OH.new_zeros(len(self._copy_OH))
        if self._is_bf16 and self.adapted:
            self.allocate_factors()

    def allocate_8_bits(self, dtype: torch.dtype) -> None:
        """Copy the frozen weights to 8 bits, if there are no adapters or all of them can be kept separately."""
        if all(map(_can_be_copied, self.layers)) and not self._is_bf16:
            self.allocate_factors()
            if self._factors is not None or not self.adapted:
                self._in_8_bits = in_8_bits(self.bases, dtype)

    def allocate_factors(self) -> None:
        """Allocate the joined factors of the adapters, if all layers have one."""
        if all(_is_adapted(layer) and _can_be_copied(layer) for layer in self.layers):
            a_RH = torch.cat([layer.lora_A[ADAPTER].weight for layer in self.layers])
            if self._is_bf16 or a_RH.dtype == self.bases[0].weight.dtype:
                outputs = sum(base.out_features for base in self.bases)
                self._factors = a_RH, a_RH.new_zeros(outputs, len(a_RH))

    def _refresh_factors(self, a_RH: Tensor, b_OR: Tensor) -> None:
        rank = row = 0
        for layer in self.layers:
            is_on = ADAPTER in _active_adapters(layer)
            a, b = (part[ADAPTER].weight for part in (layer.lora_A, layer.lora_B))
            ranks, rows = slice(rank, rank := rank + len(a)), slice(row, row := row + len(b))
            a_RH[ranks].copy_(a)
            b_OR[rows, ranks].copy_(b).mul_(layer.scaling[ADAPTER] * is_on)

    def refresh(self) -> None:
        """Write the current weights into the copy, with the adapter unless it is disabled."""
        if self._factors is not None:
            self._refresh_factors(*self._factors)
        is_trained = self.adapted or any(weight.requires_grad for one in self.layers for weight in one.parameters())
        if self._copy_OH is None or (self._copy_OH.is_mkldnn and (self._is_bf16 or not is_trained)):
            return
        copy_OH = torch.empty(self._copy_OH.shape, dtype=self._copy_OH.dtype) if self.is_packed else self._copy_OH
        row = 0
        for layer, base in zip(self.layers, self.bases, strict=True):
            rows = slice(row, row := row + base.out_features)
            copy_OH[rows].copy_(base.weight)
            for adapter in [] if self._is_bf16 else _active_adapters(layer):
                copy_OH[rows].add_(layer.get_delta_weight(adapter))
            if self._bias_O is not None and base.bias is not None:
                self._bias_O[rows].copy_(base.bias)
        if self.is_packed:
            self._copy_OH = torch.ops.mkldnn._reorder_linear_weight(copy_OH, ROWS)

    @property
    def live_adapters(self) -> list[str]:
        """Names of the enabled adapters that are called with their layers, not merged or joined."""
        if self._copy_OH is not None or self._factors is not None:
            return []
        return [adapter for layer in self.layers for adapter in _active_adapters(layer)]

    def __call__(self, hidden_NH: Tensor) -> Tensor:
        if self.reads_8_bits and self._in_8_bits is not None:
            return self._with_adapter(self._in_8_bits.product(hidden_NH), hidden_NH)
        if self._copy_OH is not None and self._copy_OH.is_mkldnn:
            inputs = hidden_NH.to(self._copy_OH.dtype), self._copy_OH, self._bias_O
            product_NO = torch.ops.mkldnn._linear_pointwise(*inputs, "none", [], "")
            return self._with_adapter(product_NO.to(hidden_NH.dtype), hidden_NH)
        if self._copy_OH is not None:
            return F.linear(hidden_NH, self._copy_OH, self._bias_O)
        if self._factors is not None:
            return self._separate_product(hidden_NH)
        outputs = [layer(hidden_NH) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def _with_adapter(self, product_NO: Tensor, hidden_NH: Tensor, scale: float = 1.0) -> Tensor:
        """Add the product with the joined adapters, if there are any."""
        if self._factors is not None:
            a_RH, b_OR = self._factors
            product_NO.addmm_(hidden_NH @ a_RH.t(), b_OR.t(), alpha=scale)
        return product_NO

    def _separate_product(self, hidden_NH: Tensor) -> Tensor:
        """Return the product with the weights of the layers and with their joined adapters."""
        outputs = sum(base.out_features for base in self.bases)
        result_NO, row = hidden_NH.new_empty(len(hidden_NH), outputs), 0
        for base in self.bases:
            part_NO = result_NO[:, row : (row := row + base.out_features)]
            if base.bias is None:
                torch.mm(hidden_NH, base.weight.t(), out=part_NO)
            else:
                torch.addmm(base.bias, hidden_NH, base.weight.t(), out=part_NO)
        return self._with_adapter(result_NO, hidden_NH)

    def add_to(self, sum_NO: Tensor, hidden_NH: Tensor, scale: float) -> None:
        """Add a multiple of the product to a sum. A card does this within the matmul if there is no bias."""
        is_separate = self.bases[0].bias is not None or (self._copy_OH is None and self._factors is None)
        if not sum_NO.is_cuda or is_separate or (self.reads_8_bits and self._in_8_bits is not None):
            sum_NO.add_(self(hidden_NH), alpha=scale)
        else:
            weight_OH = self.bases[0].weight if self._copy_OH is None else self._copy_OH
            sum_NO.addmm_(hidden_NH, weight_OH.t(), alpha=scale)
            self._with_adapter(sum_NO, hidden_NH, scale)


def copy_what_fits(projections: Iterable[Projection], device: torch.device) -> None:
    """Copy the weights of projections as long as memory allows. Adapted ones come first, because their copies also save
    two matmuls, and small ones before large ones, because each copy saves the same number of calls."""
    budget = spare_bytes(device)
    for projection in sorted(projections, key=lambda projection: (not projection.adapted, projection.bytes)):
        if projection.gains_from_a_copy and projection.bytes <= budget:
            budget -= projection.bytes
            projection.allocate_copy()
        elif device.type == "cuda":
            projection.allocate_factors()


def spare_bytes(device: torch.device) -> int:
    """Return how many bytes sampling may keep between two steps."""
    return (free_bytes(device) if device.type == "cuda" else hardware.free_ram()) // SPARE


def _base(layer: Any) -> Any:
    return getattr(layer, "base_layer", layer)


def _is_adapted(layer: Any) -> bool:
    """Return True if the layer has the trained adapter. A teacher's adapter is not sampled from."""
    return ADAPTER in getattr(layer, "lora_A", ())


def _active_adapters(layer: Any) -> list[str]:
    if not hasattr(layer, "lora_A") or layer.disable_adapters:
        return []
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


def _can_be_copied(layer: Any) -> bool:
    """Return True for linear layers without an adapter or with plain LoRA. Variants such as DoRA are not W + B A."""
    is_linear = type(_base(layer)) in (nn.Linear, Bf16Linear)  # other quantised layers are subclasses
    if not is_linear or _base(layer) is layer:
        return is_linear
    is_lora = hasattr(layer, "lora_A") and not layer.merged
    is_plain = is_lora and type(layer.lora_variant.get(ADAPTER)) in (type(None), LowRank)
    return is_plain and not layer.lora_bias.get(ADAPTER)
