"""A frozen base in fewer bits, below a trained adapter: in 4 or 8 bits by bitsandbytes (NF4 or LLM.int8), or in bf16 on
a CPU, where everything else is in fp32.

bitsandbytes quantises layers one by one while they are loaded, so the whole model is never in memory in 16 bits.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BitsAndBytesConfig

# Layers of Mamba, Jamba and Gemma 3n whose weights are read without a call.
READ = ("mixer.dt_proj", "mamba.dt_proj", "altup.correction_coefs")


class Bf16Linear(nn.Linear):
    """A frozen layer that rounds its weight and input to bf16 and returns the type of its input. A CPU with AMX,
    or one of AMD with AVX512-BF16, multiplies bf16 about twice as fast as fp32."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.bfloat16(), self.weight, self.bias).to(hidden.dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Stay in bf16 when the model is converted, as DeepSpeed does to every model."""
        super()._apply(fn, recurse)
        for value in self.parameters(recurse=False):
            value.data = value.data.bfloat16()
        return self


def round_to_bf16(model: Any) -> None:
    """Round the linear layers of a model, except its output layer, and those whose weights are read without a call."""
    head = model.get_output_embeddings()
    for name, layer in [*model.named_modules()]:
        if type(layer) is not nn.Linear or layer is head or name.endswith(READ):
            continue
        layer.__class__ = Bf16Linear
        layer.requires_grad_(False).bfloat16()


def options(kind: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    if kind == "int8":
        # To find outliers, a threshold makes every layer wait for the card, which no CUDA graph allows.
        config = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    else:
        nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
        config = BitsAndBytesConfig(load_in_4bit=True, **nf4)
    return {"quantization_config": config, "device_map": {"": device}}


def keep_training_arithmetic(model: Any) -> Any:
    """Make bitsandbytes compute the same in eval mode as in training mode. In eval mode on a CPU it would round the
    inputs of 8-bit layers, and on some processors repack 4-bit weights, which then pass on no gradient."""
    for layer in layers(model):
        if layer.weight.device.type == "cpu":
            layer.support_avx512bf16_for_cpu = False
            layer.register_forward_pre_hook(lambda layer, _: setattr(layer, "training", True))
    return model


def release(model: Any) -> None:
    """Free the tensors of bitsandbytes that are not parameters. The model cannot be used afterwards."""
    for layer in layers(model):
        if hasattr(layer, "state"):
            layer.state.reset_grads()
        layer.weight.quant_state = layer.weight.CB = layer.weight.SCB = None


def layers(model: Any) -> Iterator[Any]:
    """Return the layers of bitsandbytes, including those below an adapter."""
    return (part for part in model.modules() if type(part).__module__ == "bitsandbytes.nn.modules")
