"""The base in 4 or 8 bits: NF4 and LLM.int8 of bitsandbytes. It is frozen; what learns is the adapter over it.

The layers between embeddings and output layer are quantised while they are read, one after the other, on the device
that they are for: the model is never there in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig


def options(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What `from_pretrained` is told."""
    if kind == "int8":
        how = BitsAndBytesConfig(load_in_8bit=True)
    else:
        how = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": how, "device_map": {"": device}}


def as_it_is_trained(model: Any) -> Any:
    """The same arithmetic while sampling and while training.

    On a CPU bitsandbytes computes differently in eval mode: it rounds what goes into an 8-bit layer as well, and packs
    a 4-bit weight for instructions of some processors, after which there is no gradient through it.
    """
    for layer in layers(model):
        if layer.weight.device.type == "cpu":
            layer.support_avx512bf16_for_cpu = False
            layer.register_forward_pre_hook(_in_training_mode)
    return model


def _in_training_mode(layer: Any, _: Any) -> None:
    layer.training = True


def release(model: Any) -> None:
    """Give back what is kept beside the parameters, the end of this model."""
    for layer in layers(model):
        if hasattr(layer, "state"):
            layer.state.reset_grads()
        layer.weight.quant_state = layer.weight.CB = layer.weight.SCB = None


def layers(model: Any) -> Iterator[Any]:
    """bitsandbytes's own, also those under an adapter."""
    return (part for part in model.modules() if type(part).__module__ == "bitsandbytes.nn.modules")
