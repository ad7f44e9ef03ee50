"""The low-rank product of an adapter in fewer and larger calls than PEFT's: it is added in place to the output of the
layer below, and scaled inside the matrix products. PEFT still manages the parameters, their names and the files."""

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.variants import LoraVariant
from torch import Tensor, nn

from trainer.model import lora, onednn
from trainer.model.quantised import Bf16Linear


def use_own(model: Any) -> None:
    """Compute the trained adapter by `LowRank` in layers with plain LoRA, and fuse it with the layer below if that is a
    linear layer of torch."""
    for _, layer in lora.layers(model):
        is_linear = type(dict(layer.lora_A.items()).get(lora.ADAPTER)) is nn.Linear
        if is_linear and lora.ADAPTER not in layer.lora_variant and not layer.lora_bias[lora.ADAPTER]:
            layer.lora_variant[lora.ADAPTER] = LowRank()
            if type(layer.base_layer) in (nn.Linear, Bf16Linear):
                layer.forward = MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor, **options: Any) -> Tensor:
    """Return the sum of the layer and its adapter, from PEFT in all cases that are not plain."""
    base, is_plain = layer.base_layer, not (options or layer.disable_adapters or layer.merged)
    if is_plain and layer.active_adapters == [lora.ADAPTER]:
        factors = [part[lora.ADAPTER].weight for part in (layer.lora_A, layer.lora_B)]
        weights = factors if type(base) is Bf16Linear else [base.weight, *factors]
        if _are_alike(x, *weights) and not base.weight.requires_grad:
            return _Product.apply(None, x, *factors, layer.scaling[lora.ADAPTER], base.weight, base.bias)
    return type(layer).forward(layer, x, **options)


def _are_alike(x: Tensor, *weights: Tensor) -> bool:
    """Return False for factors in fp32 over a base in 16 bits, and under ZeRO-3, which gathers weights only when their
    modules are called."""
    return all(weight.dtype == x.dtype and not hasattr(weight, "ds_id") for weight in weights)


class LowRank(LoraVariant):
    """The variant that PEFT calls instead of its own forward pass, over layers of bitsandbytes."""

    @staticmethod
    def forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **options: Any) -> Tensor:
        factors = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling, weights = module.scaling[active_adapter], [factor.weight for factor in factors]
        if x.dtype != result.dtype or not _are_alike(x, *weights):
            return result + factors[1](factors[0](x)) * scaling
        result = result.clone() if result._is_view() else result  # 8-bit layers return a view: no in-place changes
        return _Product.apply(result, x, *weights, scaling)


class _Product(torch.autograd.Function):
    """Adds scaling * x A^T B^T to a result, whose gradient passes through unchanged, or to x W^T + bias, where W is
    frozen and may be in bf16."""

    @staticmethod
    def forward(
        context: Any, result: Tensor | None, x: Tensor, a_RH: Tensor, b_OR: Tensor, scaling: float, *base: Tensor | None
    ) -> Tensor:
        x_NH = x.flatten(0, -2)
        inner_NR = _scaled(x_NH, a_RH.t(), scaling)
        if result is None:
            weight, bias = base
            assert weight is not None
            result_NO = onednn.linear(x_NH.to(weight.dtype), weight, bias).to(x.dtype)
            # no view, which models such as Gemma 3n could not change in place
            result = torch.ops.aten._unsafe_view(result_NO, (*x.shape[:-1], len(weight)))
        else:
            context.mark_dirty(result)
        result.flatten(0, -2).addmm_(inner_NR, b_OR.t())
        context.save_for_backward(x_NH, inner_NR, a_RH, b_OR, *base[:1])
        context.scaling, context.shape = scaling, x.shape
        return result

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x_NH, inner_NR, a_RH, b_OR, *base = context.saved_tensors
        gradient_NO, by_x = gradient.flatten(0, -2), None
        slope_NR = _scaled(gradient_NO, b_OR, context.scaling)
        if context.needs_input_grad[1]:
            by_x = onednn.linear(gradient_NO.to(base[0].dtype), base[0].t()).to(gradient.dtype) if base else None
            by_x = slope_NR @ a_RH if by_x is None else by_x.addmm_(slope_NR, a_RH)
            by_x = by_x.view(context.shape)
        by_result = gradient if context.needs_input_grad[0] else None
        return by_result, by_x, slope_NR.t() @ x_NH, gradient_NO.t() @ inner_NR, *[None] * (3 if base else 1)


def _scaled(left: Tensor, right: Tensor, factor: float) -> Tensor:
    return left.new_empty(len(left), right.shape[1]).addmm_(left, right, beta=0, alpha=factor)
