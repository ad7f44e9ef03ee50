"""The shapes of common models, so that a plan needs no network.

Each was compared with the size that its makers publish, where they do (`tests/plan/test_planner.py`).
"""

from typing import Any

# family, hidden, layers, heads, key/value heads, size of a head, intermediate, vocabulary, tied, context
TABLE: dict[str, tuple[Any, ...]] = {
    "Qwen/Qwen2.5-0.5B": ("qwen2", 896, 24, 14, 2, 64, 4864, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, 32768),
    "Qwen/Qwen2.5-3B": ("qwen2", 2048, 36, 16, 2, 128, 11008, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, 32768),
    "Qwen/Qwen2.5-14B": ("qwen2", 5120, 48, 40, 8, 128, 13824, 152064, False, 32768),
    "Qwen/Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 128, 27648, 152064, False, 32768),
    "Qwen/Qwen2.5-72B": ("qwen2", 8192, 80, 64, 8, 128, 29568, 152064, False, 32768),
    "Qwen/Qwen2.5-Math-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, True, 4096),
    "Qwen/Qwen2.5-Math-7B": ("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, False, 4096),
    "Qwen/Qwen3-0.6B": ("qwen3", 1024, 28, 16, 8, 128, 3072, 151936, True, 40960),
    "Qwen/Qwen3-1.7B": ("qwen3", 2048, 28, 16, 8, 128, 6144, 151936, True, 40960),
    "Qwen/Qwen3-4B": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 40960),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 262144),
    "Qwen/Qwen3-4B-Thinking-2507": ("qwen3", 2560, 36, 32, 8, 128, 9728, 151936, True, 262144),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 128, 12288, 151936, False, 40960),
    "Qwen/Qwen3-14B": ("qwen3", 5120, 40, 40, 8, 128, 17408, 151936, False, 40960),
    "Qwen/Qwen3-32B": ("qwen3", 5120, 64, 64, 8, 128, 25600, 151936, False, 40960),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("qwen2", 1536, 28, 12, 2, 128, 8960, 151936, False, 131072),
    "meta-llama/Meta-Llama-3-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 8192),
    "meta-llama/Llama-3.2-1B": ("llama", 2048, 16, 32, 8, 64, 8192, 128256, True, 131072),
    "meta-llama/Llama-3.2-3B": ("llama", 3072, 28, 24, 8, 128, 8192, 128256, True, 131072),
    "meta-llama/Llama-3.1-8B": ("llama", 4096, 32, 32, 8, 128, 14336, 128256, False, 131072),
    "HuggingFaceTB/SmolLM2-135M": ("llama", 576, 30, 9, 3, 64, 1536, 49152, True, 8192),
    "HuggingFaceTB/SmolLM2-360M": ("llama", 960, 32, 15, 5, 64, 2560, 49152, True, 8192),
    "HuggingFaceTB/SmolLM2-1.7B": ("llama", 2048, 24, 32, 32, 64, 8192, 49152, True, 8192),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", 2048, 36, 16, 4, 128, 11008, 128256, True, 65536),
    "google/gemma-2-2b": ("gemma2", 2304, 26, 8, 4, 256, 9216, 256000, True, 8192),
    "google/gemma-2-9b": ("gemma2", 3584, 42, 16, 8, 256, 14336, 256000, True, 8192),
    "google/gemma-3-270m": ("gemma3_text", 640, 18, 4, 1, 256, 2048, 262144, True, 32768),
    "google/gemma-3-1b": ("gemma3_text", 1152, 26, 4, 1, 256, 6912, 262144, True, 32768),
    "google/gemma-3-4b": ("gemma3_text", 2560, 34, 8, 4, 256, 10240, 262208, True, 131072),  # its text part
}


def _config(model_type: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    """Return what decides about bytes in a config.json. The sizes are those of `keys`."""
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return dict(zip((*keys, "vocab_size"), sizes, strict=True)) | {"model_type": model_type} | others


_DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_DELTA |= {"linear_conv_kernel_dim": 4, "full_attention_interval": 4, "head_dim": 256}
_QWEN35 = {"max_position_embeddings": 262144, "linear_num_value_heads": 16, "tie_word_embeddings": True, **_DELTA}
_QWEN35_4B = _QWEN35 | {"linear_num_value_heads": 32}
_QWEN35_9B = _QWEN35_4B | {"tie_word_embeddings": False}
_GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256}
_GEMMA4 |= {"vocab_size_per_layer_input": 262144, "max_position_embeddings": 131072, "tie_word_embeddings": True}
_LFM2: dict[str, Any] = {"max_position_embeddings": 128000, "conv_L_cache": 3}
_LFM2 |= {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}
# eight layers have attention; which ones makes no difference here
_LFM2_2B = _LFM2 | {"full_attn_idxs": [*range(8)], "block_auto_adjust_ff_dim": False}
_A3B = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "attention_bias": True, "max_position_embeddings": 131072}
_OSS["sliding_window"] = 128
SLIDING, FULL = "sliding_attention", "full_attention"
_E2B = {"num_kv_shared_layers": 20, "layer_types": [*[SLIDING] * 4, FULL] * 7, "use_double_wide_mlp": True}
_E4B = {"num_kv_shared_layers": 18, "layer_types": [*[SLIDING] * 5, FULL] * 7}
CONFIGS = {
    "Qwen/Qwen3.5-0.8B": _config("qwen3_5_text", (1024, 3584, 24, 8, 2, 248320), **_QWEN35),
    "Qwen/Qwen3.5-2B": _config("qwen3_5_text", (2048, 6144, 24, 8, 2, 248320), **_QWEN35),
    "Qwen/Qwen3.5-4B": _config("qwen3_5_text", (2560, 9216, 32, 16, 4, 248320), **_QWEN35_4B),
    "Qwen/Qwen3.5-9B": _config("qwen3_5_text", (4096, 12288, 32, 16, 4, 248320), **_QWEN35_9B),
    "google/gemma-4-E2B": _config("gemma4_text", (1536, 6144, 35, 8, 1, 262144), **_GEMMA4, **_E2B),
    "google/gemma-4-E4B": _config("gemma4_text", (2560, 10240, 42, 8, 2, 262144), **_GEMMA4, **_E4B),
    "LiquidAI/LFM2-350M": _config("lfm2", (1024, 6656, 16, 16, 8, 65536), **_LFM2),
    "LiquidAI/LFM2-700M": _config("lfm2", (1536, 10240, 16, 24, 8, 65536), **_LFM2),
    "LiquidAI/LFM2-1.2B": _config("lfm2", (2048, 12288, 16, 32, 8, 65536), **_LFM2),
    "LiquidAI/LFM2-2.6B": _config("lfm2", (2048, 10752, 30, 32, 8, 65536), **_LFM2_2B),
    "Qwen/Qwen3-30B-A3B": _config("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), max_position_embeddings=40960, **_A3B),
    "openai/gpt-oss-20b": _config("gpt_oss", (2880, 2880, 24, 64, 8, 201088), num_local_experts=32, **_OSS),
    "openai/gpt-oss-120b": _config("gpt_oss", (2880, 2880, 36, 64, 8, 201088), num_local_experts=128, **_OSS),
}
for _name in ("LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B"):
    CONFIGS[_name.replace("LFM2", "LFM2.5")] = CONFIGS[_name]
for _variant in ("Instruct", "Thinking"):
    CONFIGS[f"Qwen/Qwen3-30B-A3B-{_variant}-2507"] = CONFIGS["Qwen/Qwen3-30B-A3B"] | {"max_position_embeddings": 262144}
