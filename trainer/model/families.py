"""The families of models that Octet plans for, decodes and exports: one row for each class of transformers.

A row has the facts that are in the code of the class and not in its config.json. `model/shapes.py` and `plan/` use
those about weights, `rollout/decoder/` those about the forward pass, and `export/` those about llama.cpp. A new family
is a row here; new kinds of layers also need a forward pass in `rollout/decoder/`, and their bytes in `plan/`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ATTENTIONS = ("full_attention", "sliding_attention")  # kinds of layers
MIXERS = {"conv": "conv", "linear_attention": "linear_attn"}  # other kinds of layers, and their attributes in a block
STRETCHES = ("default", "linear", "yarn")  # types of rotary embedding that llama.cpp supports in all families
ALL_STRETCHES = (*STRETCHES, "llama3", "longrope")  # the last two need a tensor of factors, which few families read


@dataclass(frozen=True, slots=True)
class Family:
    kind: str  # the name of the class, without "ForCausalLM"
    model_type: str  # in config.json
    decodes: bool = True  # rollout/decoder supports the family
    is_mixed: bool = False  # some blocks differ from those of Llama; see model/shapes.py
    mixture: Literal["", "plain", "gpt_oss"] = ""  # of experts; that of gpt-oss has biases, and attention sinks

    # the weights
    is_joined: bool = False  # one linear layer computes queries, keys and values, and another one gate and up
    has_biases: bool = False  # the default of attention_bias in config.json; for q, k and v only
    is_tied: bool = False  # the default of tie_word_embeddings in config.json
    norms: Literal["before", "after", "both"] = "before"  # of attention and feed-forward layers
    query_norms: Literal["none", "each", "all"] = "none"  # norms of queries and keys: of each head, or of all together
    rotates_first: bool = False  # these norms come after the rotary embedding
    adds_one: bool = False  # the norms' weights are stored minus 1
    is_gated: bool = False  # q also computes a gate for the output of each head
    gates_heads: bool = False  # a layer g_proj computes one factor for each head
    names: Mapping[str, str] = field(default_factory=dict, hash=False)  # of parts, where they differ from Llama's

    # the forward pass
    windows: Literal["configured", "every layer", "some layers"] = "configured"  # which layers have a sliding window
    is_capped: bool = False  # soft caps on the logits
    is_eager: bool = False  # attention has soft caps or sinks, which sdpa cannot compute

    # llama.cpp
    arch: str = ""  # llama.cpp's name of the family; empty if export/ does not support it
    ropes: tuple[str, ...] = STRETCHES  # supported types of rotary embedding
    turns_pairs: bool = False  # rotary embeddings pair neighbouring numbers, not those of the two halves of a head

    def part(self, name: str) -> str:
        """Return the family's name of a part of Llama."""
        return self.names.get(name, name)

    @property
    def gates(self) -> tuple[str, ...]:
        """Names of the linear layers that read the input of the feed-forward part."""
        is_joined = self.is_joined or "gate_up_proj" in self.names
        return tuple(map(self.part, ("gate_up_proj",) if is_joined else ("gate_proj", "up_proj")))

    @property
    def block_norms(self) -> int:
        return 4 if self.norms == "both" else 2


LFM3_NAMES = {"mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "norm": "embedding_norm"}
LFM2_NAMES = {**LFM3_NAMES, "o_proj": "out_proj", "q_norm": "q_layernorm", "k_norm": "k_layernorm"}
LFM2_NAMES |= {"input_layernorm": "operator_norm", "post_attention_layernorm": "ffn_norm"}
LFM3_NAMES |= {"input_layernorm": "operator_norm", "post_attention_layernorm": "post_operator_norm"}
LFM3_NAMES |= {"pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffn_norm"}
HUNYUAN_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}
HUNYUAN: dict[str, Any] = {"query_norms": "each", "rotates_first": True, "ropes": ("default", "dynamic")}
GRANITE4_NAMES = {"mlp": "shared_mlp", "gate_up_proj": "input_linear", "down_proj": "output_linear"}
GEMMA: dict[str, Any] = {"is_tied": True, "norms": "both", "windows": "some layers"}  # Gemma 2 and later, LFM3

ROWS = (
    Family("Qwen2", "qwen2", has_biases=True, arch="qwen2"),
    Family("Qwen3", "qwen3", query_norms="each", arch="qwen3"),
    Family("Llama", "llama", arch="llama", ropes=ALL_STRETCHES, turns_pairs=True),
    Family("Mistral", "mistral", windows="every layer", arch="llama", ropes=ALL_STRETCHES, turns_pairs=True),
    Family("Ministral", "ministral", arch="llama", ropes=ALL_STRETCHES, turns_pairs=True),
    Family("Ministral3", "ministral3", windows="every layer", arch="mistral3", ropes=("yarn",), turns_pairs=True),
    Family("SmolLM3", "smollm3", is_tied=True, arch="smollm3", turns_pairs=True),
    Family("Granite", "granite", arch="granite", turns_pairs=True),
    Family("GraniteMoeHybrid", "granitemoehybrid", is_mixed=True, names=GRANITE4_NAMES),
    Family("Phi3", "phi3", is_joined=True, windows="every layer", arch="phi3", ropes=("default", "longrope")),
    Family("Olmo2", "olmo2", norms="after", query_norms="all", arch="olmo2"),
    Family("Olmo3", "olmo3", norms="after", query_norms="all", arch="olmo2"),
    Family("Exaone4", "exaone4", norms="after", query_norms="each", arch="exaone4", ropes=(*STRETCHES, "llama3")),
    Family("HunYuanDenseV1", "hunyuan_v1_dense", names=HUNYUAN_NAMES, arch="hunyuan-dense", **HUNYUAN),
    Family("SeedOss", "seed_oss", has_biases=True, arch="seed_oss"),
    Family("Gemma", "gemma", is_tied=True, adds_one=True, arch="gemma"),
    Family("Gemma2", "gemma2", decodes=False, adds_one=True, is_capped=True, is_eager=True, **GEMMA),
    Family("Gemma3", "gemma3_text", query_norms="each", adds_one=True, arch="gemma3", **GEMMA),
    Family("Gemma4", "gemma4_text", is_mixed=True, query_norms="each", arch="gemma4", ropes=("proportional",), **GEMMA),
    Family("Qwen3_5", "qwen3_5_text", is_mixed=True, query_norms="each", adds_one=True, is_gated=True, arch="qwen35"),
    Family("Lfm2", "lfm2", is_mixed=True, is_tied=True, query_norms="each", names=LFM2_NAMES, arch="lfm2"),
    Family("Lfm3", "lfm3", is_mixed=True, query_norms="each", gates_heads=True, names=LFM3_NAMES, **GEMMA),
    Family("Qwen3Moe", "qwen3_moe", decodes=False, is_mixed=True, mixture="plain", query_norms="each"),
    Family("GptOss", "gpt_oss", decodes=False, is_mixed=True, mixture="gpt_oss", is_eager=True),
)
BY_CLASS = {f"{row.kind}ForCausalLM": row for row in ROWS}
BY_TYPE = {row.model_type: row for row in ROWS}
