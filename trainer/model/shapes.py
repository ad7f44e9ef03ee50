"""The shape of a model: the numbers of its config.json, and what follows from them. No weights are read.

Shapes of common models are shipped, so that a plan needs no network. Others come from a folder, from the cache, or from
the hub, which is one small file.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.settings import Model
from trainer.errors import ModelError
from trainer.model import hub
from trainer.model.families import BY_TYPE, Family

NANO = Path(__file__).parent / "nano"
CHUNK_BYTES = 64 * 2**20  # of fp32 logits that loss/ computes at once; about three such tensors are alive


class UnknownFamily(ModelError):
    """Raised for a model that may be trained, but whose memory cannot be planned."""


class Linear(NamedTuple):
    name: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model's config.json."""

    family: Family
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    tied: bool  # the output layer is the embedding
    context: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    windowed: bool = False  # some layers have sliding-window attention

    @property
    def queries(self) -> int:
        """Width of a token's queries, all heads together."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of a token's keys, and of its values."""
        return self.kv_heads * self.head_size

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for projection in self.projections for linear in projection)

    @property
    def projections(self) -> tuple[tuple[Linear, ...], ...]:
        """The linear layers of one block by what they read: layers with the same input stand together."""
        hidden, width = self.hidden, self.intermediate
        if self.family.is_joined:
            heads: tuple[Linear, ...] = (Linear("qkv_proj", hidden, self.queries + 2 * self.keys, self.qkv_bias),)
            gates: tuple[Linear, ...] = (Linear("gate_up_proj", hidden, 2 * width, self.mlp_bias),)
        else:
            outputs = {"q_proj": self.queries, "k_proj": self.keys, "v_proj": self.keys}
            heads = tuple(Linear(name, hidden, size, self.qkv_bias) for name, size in outputs.items())
            gates = tuple(Linear(name, hidden, width, self.mlp_bias) for name in ("gate_proj", "up_proj"))
        out = Linear("o_proj", self.queries, hidden, self.out_bias)
        return heads, (out,), gates, (Linear("down_proj", width, hidden, self.mlp_bias),)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and output layer."""
        return self.embedding * (2 - self.tied)

    @property
    def norms(self) -> int:
        of_heads = {"none": 0, "each": 2 * self.head_size, "all": self.queries + self.keys}[self.family.query_norms]
        return self.layers * (self.family.block_norms * self.hidden + of_heads) + self.hidden

    @property
    def parameters(self) -> int:
        of_block = sum(linear.weights + linear.outputs * linear.bias for linear in self.linears)
        return self.embeddings + self.norms + self.layers * of_block


# family, hidden, layers, heads, key/value heads, size of a head, intermediate, vocabulary, tied, context
_TABLE: dict[str, tuple[Any, ...]] = {
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
}


def _shipped(model_type: str, *numbers: Any) -> Shape:
    family = BY_TYPE[model_type]
    return replace(Shape(family, *numbers), qkv_bias=family.has_biases, windowed=family.windows == "some layers")


SHIPPED = {name: _shipped(*numbers) for name, numbers in _TABLE.items()}
NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
ENDINGS = ("-instruct", "-it", "-pt", "-base")  # variants that share their base's shape


def shape_of(name: str, revision: str | None = None) -> Shape:
    """Return the shape of a model from a folder, the shipped ones, the cache or the hub, whichever knows it first."""
    try:
        return known_shape(name, revision) or from_config(name, hub.configuration(Model(name=name, revision=revision)))
    except (hub.Refused, hub.Unreachable) as reason:
        raise ModelError(
            f"model.name={name}",
            f"its config.json cannot be had ({reason})",
            "Write a local folder, or a model of Qwen2.5, Qwen3, Llama 3, SmolLM2 or Gemma, whose shapes are shipped: "
            "Qwen/Qwen2.5-1.5B-Instruct",
        ) from None


def adapter_shapes(setting: str, folder: Path) -> dict[str, list[int]]:
    """Return the shape of each weight of an adapter by its name, from the beginning of its file; nothing for an old
    adapter_model.bin. Raise ModelError if there is no adapter."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file() and path.with_suffix(".bin").is_file():
        return {}
    try:
        with path.open("rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return {name: list(entry["shape"]) for name, entry in entries.items() if name != "__metadata__"}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        reason = f"its adapter_model.safetensors cannot be read ({type(error).__name__})"
        remedy = "Name another adapter"
        raise ModelError(f"{setting}={folder}", reason, remedy) from None


def known_shape(name: str, revision: str | None = None) -> Shape | None:
    """Return the shape without the network; None for a model that only the hub knows."""
    folder = NANO if name == "nano" else hub.local_folder(name)
    if folder:
        return from_config(name, hub.read_json(f"model.name={name}", folder / "config.json"))
    hub.refuse_missing_folder(name)
    plain = name.lower().replace("qwen2.5-coder-", "qwen2.5-")  # of the same shapes
    for ending in ENDINGS:
        plain = plain.removesuffix(ending)
    if shipped := {known.lower(): shape for known, shape in SHIPPED.items()}.get(plain):
        return shipped
    cached = hub.snapshot(Model(name=name, revision=revision))
    return from_config(name, hub.read_json(f"model.name={name}", cached / "config.json")) if cached else None


def from_config(name: str, settings: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes. Raise ModelError if it is incomplete, or of a quantised model."""
    family = BY_TYPE.get(str(settings.get("model_type")))
    if quantised := settings.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        reason = f"it is quantised already ({method}), so an adapter could not be merged into its base"
        remedy = "Name the model that it was made from, and write model.quantize=nf4 or int8"
        raise ModelError(f"model.name={name}", reason, remedy)
    if family is None:
        raise UnknownFamily(
            f"model.name={name}: its family is {settings.get('model_type')}, and memory is planned for "
            f"{', '.join(BY_TYPE)} only."
        )
    given = [key for key in OPTIONAL if settings.get(key) is not None]
    for key in (*NUMBERS, *given):
        if key not in settings:
            raise ModelError(f"model.name={name}", f"its config.json has no '{key}'", "Is it whole?")
        value = settings[key]
        if type(value) is not int or value < 1:
            raise ModelError(f"model.name={name}", f"{key} is {value!r} in its config.json, and it is a number above 0")
    return _described(family, settings)


def _described(family: Family, settings: Mapping[str, Any]) -> Shape:
    heads, bias = settings["num_attention_heads"], bool(settings.get("attention_bias", family.has_biases))
    return Shape(
        family,
        hidden=settings["hidden_size"],
        layers=settings["num_hidden_layers"],
        heads=heads,
        kv_heads=settings.get("num_key_value_heads") or heads,
        head_size=settings.get("head_dim") or settings["hidden_size"] // heads,
        intermediate=settings["intermediate_size"],
        vocabulary=settings["vocab_size"],
        tied=settings.get("tie_word_embeddings", family.is_tied),
        context=settings.get("max_position_embeddings") or 2**17,
        qkv_bias=bias,
        out_bias=bool(settings.get("attention_out_bias", bias and not family.has_biases)),
        mlp_bias=bool(settings.get("mlp_bias")),
        windowed=family.windows == "some layers" or _has_window(settings),
    )


def _has_window(settings: Mapping[str, Any]) -> bool:
    """Return True if a layer has sliding-window attention. Qwen2 names a window that it does not use."""
    kinds = settings.get("layer_types")
    if kinds:
        return kinds != ["full_attention"] * len(kinds) if isinstance(kinds, list) else True
    return bool(settings.get("sliding_window")) and settings.get("use_sliding_window", True)
