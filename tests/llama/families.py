"""Tiny random models of the families that GGUF files are written of, with the shipped tokenizer."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import NANO

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 480, "max_position_embeddings": 1024}
SHAPE |= {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 16.0}
BEYOND = {"original_max_position_embeddings": 16}
BY_KIND = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": YARN}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 8, "attention_factor": 1.0}
LONG |= {"short_factor": [1.0] * 8, "long_factor": [1.5, 2.0, 2.0, 3.0, 4.0, 6.0, 9.0, 9.0]}
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 9.0}
SHORT = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 512}
SHORT |= {"short_factor": [1.0, 1.1, 1.3, 2.0, 2.5, 3.0], "long_factor": [9.0] * 6, "partial_rotary_factor": 0.75}
PHI4_MINI = {"rope_parameters": SHORT, "original_max_position_embeddings": 512, "tie_word_embeddings": True}
ALTERNATING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]}
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0}
QWEN3_5 = {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "num_hidden_layers": 3}
QWEN3_5 |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
QWEN3_5 |= {"linear_value_head_dim": 16}
GEMMA4 = {"layer_types": ["sliding_attention", "full_attention"] * 3, "num_hidden_layers": 6, "sliding_window": 16}
GEMMA4 |= {"global_head_dim": 32, "tie_word_embeddings": True, "hidden_size_per_layer_input": 0}
SHARING = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 5.0}
SHARING |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 480}
ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXAONE4 = {"sliding_window": None, "layer_types": ["full_attention"] * 5}
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": LLAMA3}),
    "llama beyond its first context": ("llama", {"rope_parameters": LONG}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 512}),
    "ministral": ("ministral", {**ALTERNATING, "sliding_window": 512}),
    "ministral3": ("ministral3", {"rope_parameters": YARN | MSCALE}),
    "ministral3 beyond its first context": ("ministral3", {"rope_parameters": YARN | MSCALE | BEYOND}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", SCALES),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2 linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {"sliding_window": 512}),
    "phi3 longrope": ("phi3", PHI4_MINI),
    "olmo2": ("olmo2", {"tie_word_embeddings": False}),
    "olmo3": ("olmo3", {**ALTERNATING, "rope_parameters": BY_KIND, "tie_word_embeddings": False}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": ALPHA}),
    "exaone4": ("exaone4", {**EXAONE4, "rope_parameters": LLAMA3}),
    "exaone4 yarn": ("exaone4", {**EXAONE4, "rope_parameters": YARN}),
    "seed_oss": ("seed_oss", {}),
    "gemma": ("gemma", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "qwen3.5": ("qwen3_5_text", QWEN3_5),
    "qwen3.5 with a head of values for each of keys": ("qwen3_5_text", QWEN3_5 | {"linear_num_key_heads": 4}),
    "gemma4": ("gemma4_text", GEMMA4 | SHARING),
    "gemma4 with keys as values": ("gemma4_text", GEMMA4 | ALIKE),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16}),
}


def make(name: str, folder: Path, **changed: int) -> Path:
    kind, more = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **more, **changed}))
    for part, value in model.named_parameters():
        if "norm" in part or "bias" in part:  # else they are all ones, or zero
            value.data.add_(torch.randn_like(value), alpha=0.3)
        if kind == "gemma4_text" and "q_norm" in part:  # nothing else scales its scores
            value.data.mul_(SHAPE["head_dim"] ** -0.5)
    for part, buffer in model.named_buffers():
        if part.endswith("layer_scalar"):
            buffer.fill_(0.7)
    model.generation_config.eos_token_id = [0, 2]  # the end of a text and of a turn
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return folder
