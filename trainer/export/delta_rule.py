"""The format in which llama.cpp stores the gated delta rule of Qwen3.5. Value heads that share a key head are adjacent
in the model; llama.cpp interleaves them, with a distance equal to the number of key heads."""

from collections.abc import Iterator
from typing import Any

import gguf
import torch
from torch import Tensor


def reasons(config: Any) -> Iterator[str]:
    """Yield the reasons why llama.cpp would compute something else."""
    if config.linear_key_head_dim != config.linear_value_head_dim:
        sizes = f"{config.linear_key_head_dim} and {config.linear_value_head_dim}"
        yield f"linear_key_head_dim and linear_value_head_dim are {sizes}, and llama.cpp has one size for both"


def write(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the sizes of the rule, and the layers that use it."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array("qwen35.attention.recurrent_layers", kinds)  # the package has no method for this key
    angles = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1)) // 2
    writer.add_rope_dimension_sections([*((angles + rest) // 3 for rest in (2, 1, 0)), 0])  # the split for images


def stored(value: Tensor, name: str, config: Any, back: bool) -> Tensor:
    """Convert a weight to the format of llama.cpp, or with `back` to that of the model."""
    part, keys = name.rpartition(".linear_attn.")[2], config.linear_num_key_heads
    if part == "norm.weight":
        return value
    if part == "A_log":
        value = (-value).log() if back else -value.exp()
    if part == "conv1d.weight" and not back:
        value = value.squeeze(1)
    rows = value.T if part == "out_proj.weight" else value
    others = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    heads = (-1, keys) if back else (keys, -1)
    value_heads = rows[others:].unflatten(0, (config.linear_num_value_heads, -1))
    reordered = value_heads.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
    rows = torch.cat((rows[:others], reordered))
    if part == "conv1d.weight" and back:
        return rows.unsqueeze(1)
    return rows.T.contiguous() if part == "out_proj.weight" else rows
