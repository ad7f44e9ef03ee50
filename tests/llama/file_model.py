"""The model in transformers with the numbers of a GGUF file, to compare llama.cpp with."""

import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.activations import GELUTanh

from trainer.export.gguf_file import BY_CLASS, Kind, stored
from trainer.model.merge import Weights
from trainer.records import Completion

# The largest error of a stored number, as a share of the largest number of its block: half a step. Q4_0 and Q5_0 have
# steps from -8 to 7 and from -16 to 15, so the largest number of the other sign may be off by a whole step; Q4_1 and
# Q5_1 count from the smallest number of the block, in steps of up to twice the length. Scales have 16 bits.
STEP = {Kind.F32: 2**-24, Kind.F16: 2**-11, Kind.BF16: 2**-8, Kind.Q8_0: 0.5 / 127}
STEP |= {Kind.Q5_0: 1 / 16, Kind.Q5_1: 1 / 31, Kind.Q4_0: 1 / 8, Kind.Q4_1: 1 / 15}
OF_SCALES = 2**-9
SMALLEST = 2.0**-24  # the smallest number in 16 bits
# llama.cpp rounds the inputs of quantised weights to 8 bits, with one scale for each block of this size.
BLOCK_OF_8_BITS = 32
BLOCK_OF_K = 256
# Two independent roundings differ by 1.4 times the error of one.
LARGEST = 2.0  # the bound, as a multiple of the change that this rounding causes in transformers
FLOOR = 1e-3  # smaller differences come from the order of sums


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of the log-probs of llama.cpp and transformers for the same tokens and weights. `rounding` is the
    mean change in transformers if it rounds as llama.cpp does, which determines the bound."""

    mean: float
    largest: float
    rounding: float

    @property
    def bound(self) -> float:
        return LARGEST * self.rounding + FLOOR


class FileModel:
    """The model in transformers, in fp32, with the weights from a GGUF file."""

    def __init__(self, file: Path, weights: Weights, names: Mapping[str, str]) -> None:
        """Read the file. Raise AssertionError if the error of a number is larger than its format explains."""
        reader = gguf.GGUFReader(str(file))
        self.kinds: dict[str, Kind] = {}
        values = {}
        for tensor in reader.tensors:
            if name := names.get(tensor.name):
                kind, shape = tensor.tensor_type, tuple(int(size) for size in reversed(tensor.shape))
                value = torch.from_numpy(dequantize(tensor.data, kind).astype(np.float32).reshape(shape))
                _must_be_within_a_step(name, value, stored(weights[name], name, weights.config), kind)
                values[name] = of_model(value, name, weights.config).contiguous()
                self.kinds[name] = kind
        assert set(names.values()) == values.keys()
        self.model = AutoModelForCausalLM.from_config(weights.config, dtype=torch.float32).eval()
        self.model.load_state_dict(values, strict=False, assign=True)
        self.model.tie_weights()
        self.embedding = weights.embedding

    def difference(self, asked: Sequence[tuple[Sequence[int], Completion]]) -> Difference:
        """Compare the log-probs of llama.cpp's answers, given as pairs of prompt and answer."""
        exact = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                if isinstance(module, (nn.Linear, GELUTanh)):  # llama.cpp's GELU is a table for inputs of 16 bits
                    kind = self.kinds.get(f"{name}.weight", self.kinds[self.embedding])
                    kind = kind if isinstance(module, nn.Linear) else Kind.F16
                    hook = module.register_forward_pre_hook(partial(_round_input, kind))
                    hooks.callback(hook.remove)
            rounded = [self._logprobs(prompt, answer.tokens) for prompt, answer in asked]
        apart = [abs(x - y) for logprobs, (_, answer) in zip(exact, asked) for x, y in zip(logprobs, answer.logprobs)]
        rounding = [abs(x - y) for before, after in zip(exact, rounded) for x, y in zip(before, after)]
        return Difference(fmean(apart), max(apart), fmean(rounding))

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        logits_TV = self.model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs_T1 = logits_TV.double().log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])
        return [float(logprob) for logprob in logprobs_T1[:, 0]]


def _must_be_within_a_step(name: str, read: Tensor, wanted: Tensor, kind: Kind) -> None:
    if kind not in STEP:  # only llama.cpp writes it, with steps that it chooses
        return
    block = gguf.GGML_QUANT_SIZES[kind][0]
    read, wanted = (value.float().reshape(-1, block) for value in (read, wanted))
    largest, error = wanted.abs().amax(-1, keepdim=True), (read - wanted).abs()
    # a scale, which is off by half of SMALLEST at most, is multiplied by up to 127
    allowed = largest * (STEP[kind] + (OF_SCALES if block > 1 else 0)) + SMALLEST * (64 if block > 1 else 1)
    assert bool((error <= allowed).all()), f"{name} is off by {float(error.max()):.1e}, more than {kind.name} explains"


def _round_input(kind: Kind, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Round the input of a layer as llama.cpp does for weights of this kind."""
    value = arguments[0]
    if kind == Kind.F32:
        return arguments
    if kind in (Kind.F16, Kind.BF16):
        return (value.to(torch.float16 if kind == Kind.F16 else torch.bfloat16).float(),)
    block = BLOCK_OF_K if gguf.GGML_QUANT_SIZES[kind][0] == gguf.QK_K else BLOCK_OF_8_BITS
    blocks = value.reshape(-1, block)
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return (((blocks / scale).round() * scale).reshape(value.shape),)


def of_model(value: Tensor, name: str, config: Any) -> Tensor:
    """Convert a weight from the format of llama.cpp to that of the model: the inverse of `stored`."""
    family = BY_CLASS[config.architectures[0]]
    if name.endswith("conv.conv.weight"):
        return value.unsqueeze(1)
    if ".linear_attn." in name:
        return _of_delta_rule(value, name.rpartition(".linear_attn.")[2], config)
    if family.adds_one and name.endswith("norm.weight"):
        return value - 1
    projection = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
    if not (family.turns_pairs and projection):
        return value
    heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
    return value.reshape(heads, -1, 2, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _of_delta_rule(value: Tensor, part: str, config: Any) -> Tensor:
    if part == "norm.weight":
        return value
    keys = config.linear_num_key_heads
    value = (-value).log() if part == "A_log" else value
    rows = value.T if part == "out_proj.weight" else value
    others = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    value_heads = rows[others:].unflatten(0, (config.linear_num_value_heads, -1))
    reordered = value_heads.unflatten(0, (-1, keys)).transpose(0, 1).flatten(0, 2)
    rows = torch.cat((rows[:others], reordered))
    return rows.unsqueeze(1) if part == "conv1d.weight" else rows.T if part == "out_proj.weight" else rows
