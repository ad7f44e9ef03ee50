"""A frozen base in 4 or 8 bits, quantised by bitsandbytes (NF4 or LLM.int8), under an adapter that is trained.

The layers between the embedding and the output layer are quantised one by one while they are loaded, so the whole model
is never in memory in 16 bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import BitsAndBytesConfig


def options(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if kind == "int8":
        # With a threshold every layer would wait for the card to look for outliers, which no CUDA graph allows.
        how = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        how = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    return {"quantization_config": how, "device_map": {"": device}}


def keep_training_arithmetic(model: Any) -> Any:
    """Make bitsandbytes compute the same in eval mode as in training mode. On a CPU it would also round the inputs of
    8-bit layers in eval mode, and on some processors repack 4-bit weights, through which no gradient flows
    afterwards."""
    for layer in layers(model):
        if layer.weight.device.type == "cpu":
            layer.support_avx512bf16_for_cpu = False
            layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", True))
    return model


def release(model: Any) -> None:
    """Free what bitsandbytes keeps beside the parameters. The model cannot be used afterwards."""
    for layer in layers(model):
        if hasattr(layer, "state"):
            layer.state.reset_grads()
        layer.weight.quant_state = layer.weight.CB = layer.weight.SCB = None


def layers(model: Any) -> Iterator[Any]:
    """Return the layers of bitsandbytes, including those under an adapter."""
    return (part for part in model.modules() if type(part).__module__ == "bitsandbytes.nn.modules")
