"""Tiny random models of the families that GGUF files are written of, with the shipped tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.conftest import NANO

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 480, "max_position_embeddings": 1024}
SHAPE |= {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.4, "logits_scaling": 2.0}
FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 512}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", SCALES),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen2 linear": ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "olmo2": ("olmo2", {"tie_word_embeddings": False}),
    "seed_oss": ("seed_oss", {}),
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16}),
}


def make(name: str, folder: Path) -> Path:
    kind, more = FAMILIES[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **more}))
    for part, value in model.named_parameters():
        if "norm" in part or "bias" in part:  # else they are all ones, or zero
            value.data.add_(torch.randn_like(value), alpha=0.3)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(NANO).save_pretrained(folder)
    return folder
