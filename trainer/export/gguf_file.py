"""Write a model as one GGUF file, the format of llama.cpp, Ollama and LM Studio, weight by weight."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quant_shape_to_byte_shape, quantize
from huggingface_hub import constants
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trainer.errors import MergeError, ModelError
from trainer.export import vocabulary
from trainer.model.families import BY_CLASS, Family
from trainer.model.merge import Weights

Kind = gguf.GGMLQuantizationType
ROWS = 4096  # rows of a weight that are quantised at once
# Families without biases in llama.cpp.
NO_BIASES = ("qwen3", "qwen35", "smollm3", "olmo2", "gemma", "gemma3", "gemma4", "hunyuan-dense")
GELU = ("gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_fast")
AT_ENDS = Kind.Q8_0  # for embedding and output layer in block formats, because they are the most sensitive


def family_of(config: Any) -> Family:
    """Return the family of a model. Raise ModelError for a model that llama.cpp would compute differently."""
    kind = (config.architectures or ["?"])[0]
    if reason := next(_reasons(config, kind), None):
        remedy = (
            "Export --to safetensors, which transformers and vLLM run; llama.cpp's convert_hf_to_gguf.py, which "
            "converts that to a GGUF file, may support more"
        )
        raise ModelError(f"--to gguf of a {kind}", reason, remedy)
    return BY_CLASS[kind]


def _reasons(config: Any, kind: str) -> Iterator[str]:
    supported = {name: family for name, family in BY_CLASS.items() if family.arch}
    if kind not in supported:
        yield f"it is not one of {', '.join(supported)}"
    family, rope = supported[kind], _rope(config)
    sliding = config.rope_parameters.get("sliding_attention") or {}
    if rope["rope_type"] not in family.ropes or sliding.get("rope_type", "default") != "default":
        yield f"its rope_type is {rope['rope_type']}, and llama.cpp supports {', '.join(family.ropes)} in this family"
    if rope["rope_type"] == "dynamic" and not rope.get("alpha"):
        yield "its rope_type is dynamic, without alpha, and llama.cpp's angles do not depend on the length"
    betas = tuple(rope.get(name) or usual for name, usual in (("beta_fast", 32), ("beta_slow", 1)))
    if family.arch != "mistral3" and betas != (32, 1):
        yield f"its beta_fast and beta_slow are {betas}, and llama.cpp uses 32 and 1 in this family"
    positions = [bool(uses) for uses in getattr(config, "no_rope_layers", ())]
    if kind == "SmolLM3ForCausalLM" and positions != [index % 4 != 3 for index in range(len(positions))]:
        yield "llama.cpp omits positions in every fourth layer, and this model in others"
    if family.arch == "olmo2" and config.tie_word_embeddings:
        yield "its output layer is its embedding, which llama.cpp does not support in this family"
    if kind == "Olmo3ForCausalLM" and sliding["rope_theta"] != rope["rope_theta"]:
        yield "its layers with a sliding window have another rope_theta, and llama.cpp has one in this family"
    if family.arch == "exaone4" and config.sliding_window:
        yield "some of its layers have a sliding window, which Octet does not write in this family"
    if family.arch == "gemma" and not config.tie_word_embeddings:
        yield "its output layer is not its embedding, which llama.cpp uses for both in this family"
    if family.arch == "lfm2" and config.conv_bias:
        yield "its convolutions have a bias, which llama.cpp ignores"
    if family.arch == "gemma3" and config.query_pre_attn_scalar != config.head_dim:
        yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, not head_dim"
    yield from _reasons_of_layers(config, family)


def _reasons_of_layers(config: Any, family: Family) -> Iterator[str]:
    if family.arch in NO_BIASES and getattr(config, "attention_bias", False):
        yield "its attention has biases, which llama.cpp does not have in this family"
    if family.arch in ("smollm3", "seed_oss") and (config.mlp_bias or getattr(config, "attention_out_bias", False)):
        yield "its layers have biases that llama.cpp does not have in this family"
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "silu"
    if activation not in (GELU if family.arch.startswith("gemma") else ("silu", "swish")):
        yield f"its activation is {activation}, and llama.cpp uses another one in this family"
    if family.arch == "gemma3" and config.final_logit_softcapping:
        yield "its logits have a soft cap, which llama.cpp does not apply in this family"
    if family.arch == "gemma4" and config.enable_moe_block:
        yield "its feed-forward layers are mixtures of experts, which Octet does not write"
    if family.arch == "gemma4" and "sliding_attention" not in config.layer_types:
        yield "none of its layers has a sliding window, without which llama.cpp does not start"
    if family.arch == "qwen35" and config.linear_key_head_dim != config.linear_value_head_dim:
        yield "linear_key_head_dim and linear_value_head_dim differ, and llama.cpp has one size for both"


def _rope(config: Any) -> Mapping[str, Any]:
    """Return the rotary settings, those of full attention if there are several."""
    return config.rope_parameters.get("full_attention") or config.rope_parameters


def write(path: Path, weights: Weights, tokenizer: Any, fmt: str, about: Mapping[str, Any]) -> dict[str, str]:
    """Write a model to a file, with metadata (name, base, licence). Return llama.cpp's names of the weights, each with
    the name in the model."""
    config, family = weights.config, family_of(weights.config)
    names = dict(_names(weights, family.arch))
    writer = gguf.GGUFWriter(str(path), family.arch)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(about["name"])
    if licence := about["licence"]:
        writer.add_license(licence)
    if base := about["base"]:
        writer.add_base_model_count(1)
        writer.add_base_model_name(0, Path(base).name)
        if "/" in base and not Path(base).is_dir():
            writer.add_base_model_repo_url(0, f"{constants.ENDPOINT}/{base}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if fmt == "f32" else f"MOSTLY_{fmt.upper()}"])
    _write_shape(writer, weights, family)
    vocabulary.write(writer, tokenizer, weights.shapes[weights.embedding][0])
    whole = {name: weights.shapes[original] for name, original in names.items()}
    shapes = {name: shape[::2] if len(shape) == 3 else shape for name, shape in whole.items()}  # convolutions
    kinds = {name: _kind(name, shape, fmt) for name, shape in shapes.items()}
    factors = _rope_factors(config, _heads_of(weights, family)["full_attention"][0])
    for name, value in factors.items():
        writer.add_tensor_info(name, value.shape, value.dtype, value.nbytes)
    for name in names:
        shape = quant_shape_to_byte_shape(shapes[name], kinds[name])
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for value in factors.values():
        writer.write_tensor_data(value)
    for name, original in names.items():
        chunks = stored(weights[original], original, config).split(ROWS)
        try:
            with np.errstate(over="raise"):
                parts = [quantize(rows.float().numpy(), kinds[name]).view(np.uint8) for rows in chunks]
        except FloatingPointError:
            writer.close()
            reason = f"{original} has a number beyond 65,504, which its 16 bits cannot hold"
            raise MergeError(f"--format {fmt}", reason, "Take --format bf16 or q8_0") from None
        writer.write_tensor_data(np.concatenate(parts))
    writer.close()
    return names


def _names(weights: Weights, arch: str) -> Iterator[tuple[str, str]]:
    """Yield llama.cpp's name and the model's name of each weight."""
    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    known = gguf.get_tensor_name_map(by_name[arch], weights.config.num_hidden_layers)
    for original in weights.shapes:
        spelled = original.replace(".dt_bias", ".dt_proj.bias").replace(".layer_scalar", ".layer_scalar.weight")
        name = known.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ModelError("--to gguf", f"llama.cpp has no weight {original} in the family {arch}")
        yield name, original


def _kind(name: str, shape: torch.Size, fmt: str) -> Kind:
    """Return the type of a weight. Vectors and convolutions are exact; rows that fill no block have 16 bits."""
    kind: Kind = getattr(Kind, fmt.upper())
    if len(shape) == 1 or name.endswith(("_norm.weight", ".conv.weight", ".ssm_conv1d.weight")):
        return Kind.F32
    if name in ("token_embd.weight", "output.weight") and gguf.GGML_QUANT_SIZES[kind][0] > 1:
        kind = AT_ENDS
    return kind if shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0 else Kind.F16


def stored(value: Tensor, name: str, config: Any) -> Tensor:
    """Convert a weight to the format of llama.cpp."""
    family = BY_CLASS[config.architectures[0]]
    if name.endswith("conv.conv.weight"):
        return value.squeeze(1)
    if ".linear_attn." in name:
        return _stored_delta_rule(value, name, config)
    if family.adds_one and name.endswith("norm.weight"):
        return value.float() + 1
    projection = re.search(r"\.([qk])_proj\.(weight|bias)$", name)
    if not (family.turns_pairs and projection):
        return value
    heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
    return value.reshape(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def _write_shape(writer: gguf.GGUFWriter, weights: Weights, family: Family) -> None:
    config = weights.config
    rope = _rope(config)
    heads, window = _heads_of(weights, family), getattr(config, "sliding_window", None)
    head = heads["full_attention"][0]
    context, sliding = config.max_position_embeddings, config.rope_parameters.get("sliding_attention")
    if window and not sliding:  # llama.cpp supports no window in this family, and a shorter context needs none
        context = min(context, window)
    writer.add_context_length(context)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    down = f"{family.part('mlp')}.{family.part('down_proj')}.weight"  # config.json may lack the widths
    widths = [weights.shapes[f"model.layers.{index}.{down}"][1] for index in range(config.num_hidden_layers)]
    writer.add_feed_forward_length(widths if len({*widths}) > 1 else widths[0])
    if family.arch == "lfm2":
        kinds = config.layer_types
        writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    elif family.arch == "gemma4":
        writer.add_head_count_kv([heads[kind][1] for kind in config.layer_types])
        _write_gemma4(writer, config, heads)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if family.arch == "qwen35":
        _write_delta_rule(writer, config)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_vocab_size(config.vocab_size)
    writer.add_layer_norm_rms_eps(config.norm_eps if family.arch == "lfm2" else config.rms_norm_eps)
    turned = 1 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1)
    writer.add_rope_dimension_count(int(head * turned))
    alpha = rope["alpha"] if rope["rope_type"] == "dynamic" else 1  # stretches the angles of HunYuan
    writer.add_rope_freq_base(rope["rope_theta"] * alpha ** (head / (head - 2)))
    _write_stretch(writer, config)
    if family.arch == "mistral3" and (beta := rope.get("llama_4_scaling_beta")):
        writer.add_attn_temperature_scale(beta)
    if family.arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if window and sliding:
        writer.add_sliding_window(window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(sliding["rope_theta"])


def _heads_of(weights: Weights, family: Family) -> dict[str, tuple[int, int]]:
    """Return the size of a head and the number of key heads for each kind of attention."""
    config, heads = weights.config, dict[str, tuple[int, int]]()
    if family.arch == "gemma4":
        for index, kind in enumerate(config.layer_types):
            layer = f"model.layers.{index}.self_attn"
            if keys := weights.shapes.get(f"{layer}.k_proj.weight"):
                size = weights.shapes[f"{layer}.k_norm.weight"][0]
                heads.setdefault(kind, (size, keys[0] // size))
        return heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"full_attention": (size, config.num_key_value_heads)}


def _write_gemma4(writer: gguf.GGUFWriter, config: Any, heads: Mapping[str, tuple[int, int]]) -> None:
    size = heads["sliding_attention"][0]
    writer.add_key_length_swa(size)
    writer.add_value_length_swa(size)
    writer.add_rope_dimension_count_swa(size)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping or 0)  # else llama.cpp caps at 30


def _write_stretch(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write how rotary embeddings are scaled to a longer context; factors for each frequency are tensors instead."""
    rope = _rope(config)
    if (kind := rope["rope_type"]) in ("default", "dynamic", "llama3", "proportional"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    if kind != "longrope":
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "linear":
        return
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    layers = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
    _, attention = ROPE_INIT_FUNCTIONS[kind](config, None, **layers)
    if kind == "yarn":
        attention /= 0.1 * math.log(rope["factor"]) + 1  # llama.cpp multiplies by this factor itself
        for name in ("beta_fast", "beta_slow"):
            if rope.get(name):
                getattr(writer, f"add_rope_scaling_yarn_{name}")(rope[name])
    writer.add_rope_scaling_attn_factors(attention)


def _rope_factors(config: Any, head: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the divisor of each rotary frequency, under llama.cpp's tensor names. Llama 3 divides low frequencies by
    `factor`, keeps high ones, and interpolates between them."""
    rope = _rope(config)
    if rope["rope_type"] == "longrope":
        factors = {name: np.array(rope[f"{name}_factor"], np.float32) for name in ("long", "short")}
        return {f"rope_factors_{name}.weight": value for name, value in factors.items()}
    if rope["rope_type"] == "proportional":  # a huge divisor switches a frequency off
        rotated = np.arange(head // 2) < int(rope.get("partial_rotary_factor", 1) * head // 2)
        return {"rope_freqs.weight": np.where(rotated, 1, 1e30).astype(np.float32) / rope.get("factor", 1)}
    if rope["rope_type"] != "llama3":
        return {}
    waves = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head, 2) / head)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = np.clip((rope["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return {"rope_freqs.weight": (1 / ((1 - share) / rope["factor"] + share)).astype(np.float32)}


def _write_delta_rule(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    kinds = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array("qwen35.attention.recurrent_layers", kinds)  # the package has no method for this key
    angles = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1)) // 2
    writer.add_rope_dimension_sections([*((angles + rest) // 3 for rest in (2, 1, 0)), 0])  # the split for images


def _stored_delta_rule(value: Tensor, name: str, config: Any) -> Tensor:
    """Convert a weight of the gated delta rule to the format of llama.cpp. Value heads that share a key head are
    adjacent in the model; llama.cpp interleaves them, with a distance equal to the number of key heads."""
    part, keys = name.rpartition(".linear_attn.")[2], config.linear_num_key_heads
    if part == "norm.weight":
        return value
    if part == "A_log":
        value = -value.exp()
    if part == "conv1d.weight":
        value = value.squeeze(1)
    rows = value.T if part == "out_proj.weight" else value
    others = 2 * keys * config.linear_key_head_dim if part in ("in_proj_qkv.weight", "conv1d.weight") else 0
    value_heads = rows[others:].unflatten(0, (config.linear_num_value_heads, -1))
    reordered = value_heads.unflatten(0, (keys, -1)).transpose(0, 1).flatten(0, 2)
    rows = torch.cat((rows[:others], reordered))
    return rows.T.contiguous() if part == "out_proj.weight" else rows
