"""The shape of a model: the numbers of its config.json, and what follows from them. No weights are read.

Shapes of common models are part of the package, so that a plan needs no network. Others come from a config.json in a
folder, in the cache, or on the hub.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from trainer.config.settings import Model
from trainer.errors import ModelError
from trainer.model import hub
from trainer.model.families import BY_TYPE, MIXERS, Family

CHUNK_BYTES = 64 * 2**20  # bytes of the fp32 logits that loss/ computes at once; about three such tensors are alive


class UnknownShape(ModelError):
    """A model whose family has no plan, or whose config.json is not available."""


class Linear(NamedTuple):
    name: str
    inputs: int
    outputs: int
    bias: bool

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


Projections = tuple[tuple[Linear, ...], ...]  # linear layers, grouped by their common input


@dataclass(frozen=True, slots=True)
class Block:
    """`count` layers of a model that have the same sizes."""

    count: int
    projections: Projections
    mlp: int  # activations of the feed-forward part for a token, in all chosen experts
    queries: int = 0  # width of a token's queries, all heads together
    keys: int = 0  # width of a token's keys, and of its values
    caches: bool = True  # False for a layer that uses the keys and values of an earlier one
    others: int = 0  # parameters outside linear layers and experts: norms, convolutions, a router
    expert: int = 0  # parameters of an expert
    experts: int = 0
    chosen: int = 0  # experts that a token goes through
    carried: int = 0  # activations of each token that all later layers need
    inputs: int = 0  # numbers that a convolution caches for each row, in the precision of the model
    matrix: int = 0  # numbers that a recurrence caches for each row, in fp32
    mixing: float = 0  # bytes that a recurrence saves for each token for the backward pass, in addition to `mixed`
    mixed: int = 0  # activations that a layer without attention saves for each token, in the precision of the model

    @property
    def linears(self) -> Iterator[Linear]:
        return (linear for part in self.projections for linear in part)

    @property
    def weights(self) -> int:
        """The number of weights that a token is multiplied with."""
        return sum(linear.weights for linear in self.linears) + self.chosen * self.expert

    @property
    def parameters(self) -> int:
        biases = sum(linear.outputs * linear.bias for linear in self.linears)
        return self.weights + biases + self.others + (self.experts - self.chosen) * self.expert


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model, from its config.json."""

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
    kinds: tuple[Block, ...] = ()  # the blocks of a model whose layers differ from Llama's
    beside: int = 0  # parameters outside layers, embedding, output layer and last norm

    @property
    def queries(self) -> int:
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.kinds or (self.block(),)

    def block(self, **others: Any) -> Block:
        """Return the layers of Llama, with the values of the arguments in place of Llama's."""
        norms = self.family.block_norms * self.hidden + self.query_norms
        projections = (*self.attention, *self.feed_forward(self.intermediate))
        plain = Block(self.layers, projections, 3 * self.intermediate, self.queries, self.keys, others=norms)
        return replace(plain, **others)

    @property
    def query_norms(self) -> int:
        return {"none": 0, "each": 2 * self.head_size, "all": self.queries + self.keys}[self.family.query_norms]

    @property
    def attention(self) -> Projections:
        if self.family.is_joined:
            heads: tuple[Linear, ...] = (Linear("qkv_proj", self.hidden, self.queries + 2 * self.keys, self.qkv_bias),)
        else:
            gated = self.queries * (1 + self.family.is_gated)
            outputs = {"q_proj": gated, "k_proj": self.keys, "v_proj": self.keys}
            heads = tuple(Linear(name, self.hidden, size, self.qkv_bias) for name, size in outputs.items())
            heads += (Linear("g_proj", self.hidden, self.heads, False),) * self.family.gates_heads
        return heads, (Linear(self.family.part("o_proj"), self.queries, self.hidden, self.out_bias),)

    def feed_forward(self, width: int) -> Projections:
        names = self.family.gates
        gates = tuple(Linear(name, self.hidden, 2 * width // len(names), self.mlp_bias) for name in names)
        return gates, (Linear(self.family.part("down_proj"), width, self.hidden, self.mlp_bias),)

    def total(self, of_block: Callable[[Block], float]) -> float:
        """Return the sum of a number over all layers."""
        return sum(block.count * of_block(block) for block in self.blocks)

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linear layers of all kinds of blocks, each once."""
        return tuple(dict.fromkeys(linear for block in self.blocks for linear in block.linears))

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def embeddings(self) -> int:
        """Parameters of embedding and output layer."""
        return self.embedding * (2 - self.tied)

    @property
    def ends(self) -> int:
        """Parameters outside layers, embedding and output layer."""
        return self.hidden + self.beside

    @property
    def parameters(self) -> int:
        return self.embeddings + self.ends + sum(block.count * block.parameters for block in self.blocks)

    @property
    def active(self) -> int:
        """Parameters that a token uses: not all of them in a mixture of experts."""
        return self.parameters - round(self.total(lambda block: (block.experts - block.chosen) * block.expert))


# The entries that determine memory in the config.json of common models. Each was compared with the published size of
# the model, if there is one (`tests/plan/test_planner.py`).
KNOWN: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("known_shapes.json").read_bytes())
NUMBERS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
OPTIONAL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
LARGEST, MOST_LAYERS = 10**9, 10_000  # larger numbers are mistakes, with which a plan would not end
ENDINGS = ("-instruct", "-it", "-pt", "-base")  # variants that share their base's shape


def shape_of(name: str, revision: str | None = None) -> Shape:
    """Return the shape of a model from a folder, the package, the cache or the hub, in this order."""
    try:
        return known_shape(name, revision) or from_config(name, hub.configuration(Model(name=name, revision=revision)))
    except (hub.Refused, hub.Unreachable) as reason:
        remedy = "Write a local folder, or a model whose shape Octet knows, such as Qwen/Qwen3-1.7B"
        raise UnknownShape(f"model.name={name}", f"its config.json is not available ({reason})", remedy) from None


def planned_shape(model: Model) -> Shape | None:
    """Return the shape of a model, or None if it is unknown: loading the model gives the full error."""
    try:
        return shape_of(model.name, model.revision)
    except UnknownShape:
        return None


def adapter_shapes(setting: str, folder: Path) -> dict[str, list[int]]:
    """Return the shapes of an adapter's weights by name; {} for an old .bin. Raise ModelError if there is none."""
    path = folder / "adapter_model.safetensors"
    if not path.is_file() and path.with_suffix(".bin").is_file():
        return {}
    try:
        with safe_open(path, "np") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  it is no dictionary
    except (OSError, SafetensorError) as error:
        reason = f"its adapter_model.safetensors cannot be read ({error})"
        raise ModelError(f"{setting}={folder}", reason, "Name another adapter") from None


def known_shape(name: str, revision: str | None = None) -> Shape | None:
    """Return the shape of a model without the network; None if only the hub has it."""
    if folder := hub.NANO if name == "nano" else hub.local_folder(name):
        return from_config(name, hub.read_json(f"model.name={name}", folder / "config.json"))
    hub.refuse_missing_folder(name)
    plain = name.lower().replace("qwen2.5-coder-", "qwen2.5-")  # which have the same shapes
    for ending in ENDINGS:
        plain = plain.removesuffix(ending)
    if config := {known.lower(): config for known, config in KNOWN.items()}.get(plain):
        return from_config(name, config)
    cached = hub.snapshot(Model(name=name, revision=revision))
    return from_config(name, hub.read_json(f"model.name={name}", cached / "config.json")) if cached else None


def from_config(name: str, settings: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes. Raise ModelError if it is incomplete, or of a quantised model."""
    hub.refuse_quantised(name, settings)
    text = settings.get("text_config")  # of a multimodal model, of which only the text model is trained
    if isinstance(text, dict) and text.get("model_type") in BY_TYPE:
        settings = _left_out(text) | text | {key: settings[key] for key in ("tie_word_embeddings",) if key in settings}
    family = BY_TYPE.get(str(settings.get("model_type")))
    if family is None:
        raise UnknownShape(
            f"model.name={name}: its family is {settings.get('model_type')}, and memory is planned for "
            f"{', '.join(BY_TYPE)} only."
        )
    try:
        shape = _described(family, settings)
        return _with_kinds(name, shape, settings) if family.is_mixed else shape
    except ModelError:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"its config.json does not describe the model ({error})"
        raise ModelError(f"model.name={name}", reason, "Correct it, or download the model again") from None


def _left_out(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usual numbers of a class if a config.json leaves some out, as those of Gemma 3 do."""
    if all(key in text for key in NUMBERS):
        return {}
    from transformers import AutoConfig  # takes a second to import

    usual = AutoConfig.for_model(text["model_type"]).to_dict()
    return {key: usual[key] for key in (*NUMBERS, *OPTIONAL) if key in usual}


def _number(settings: Mapping[str, Any], key: str, usual: int | None = 0, least: int = 0, most: int = LARGEST) -> int:
    value = usual if settings.get(key) is None else settings[key]
    if type(value) is not int or not least <= value <= most:
        found = "missing" if value is None else repr(value)
        raise TypeError(f"{key} is {found}, and has to be a number from {least} to {most:,}")
    return value


def _described(family: Family, settings: Mapping[str, Any]) -> Shape:
    bias = bool(settings.get("attention_bias", family.has_biases))
    hidden, heads, intermediate, vocabulary = (
        _number(settings, key, None, 1)
        for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    )
    return Shape(
        family,
        hidden=hidden,
        layers=_number(settings, "num_hidden_layers", None, 1, MOST_LAYERS),
        heads=heads,
        kv_heads=_number(settings, "num_key_value_heads", heads, 1),
        head_size=_number(settings, "head_dim", hidden // heads, 1),
        intermediate=intermediate,
        vocabulary=vocabulary,
        tied=bool(settings.get("tie_word_embeddings", family.is_tied)),
        context=_number(settings, "max_position_embeddings", 2**17, 1),
        qkv_bias=bias,
        out_bias=bool(settings.get("attention_out_bias", bias and not family.has_biases)),
        mlp_bias=bool(settings.get("mlp_bias")),
        windowed=family.windows == "some layers" or _has_window(settings),
    )


def _has_window(settings: Mapping[str, Any]) -> bool:
    """Return True if a layer has sliding-window attention. Qwen2 configures a window that it does not use."""
    if kinds := settings.get("layer_types"):
        plain = ("full_attention", "attention", *MIXERS)
        return not isinstance(kinds, list) or any(kind not in plain for kind in kinds)
    return bool(settings.get("sliding_window")) and settings.get("use_sliding_window", True)


# ---------------------------------------------------------------- layers that differ from Llama's

SLIDING, FULL, CONV, DELTA = "sliding_attention", "full_attention", "conv", "linear_attention"
CHUNK = 64  # tokens in a chunk of transformers' delta rule


def _with_kinds(name: str, shape: Shape, settings: Mapping[str, Any]) -> Shape:
    """Return the shape with the kinds of blocks that its config.json describes."""
    family = shape.family
    if settings.get("enable_moe_block"):
        raise UnknownShape(f"model.name={name}: memory is not planned for the mixture of experts of Gemma 4.")
    if family.kind == "Lfm2":
        shape = replace(shape, intermediate=_lfm2_width(shape.intermediate, settings))
    kinds = settings.get("layer_types")
    if family.kind == "GraniteMoeHybrid":
        shape = replace(shape, intermediate=_number(settings, "shared_intermediate_size", 1024))
        if _number(settings, "num_local_experts", 8) or {*(kinds or [DELTA])} - {FULL, "attention"}:
            raise UnknownShape(f"model.name={name}: memory is not planned for experts and Mamba layers of Granite 4.")
    if not isinstance(kinds, list) or len(kinds) != shape.layers:
        kinds = _usual_kinds(shape, settings)
    if family.kind == "Gemma4":
        kinds = [*kinds[:-1], FULL]  # the class ignores the last entry
    counts = Counter(_block(shape, kind, index, settings) for index, kind in enumerate(kinds))
    width = shape.layers * _number(settings, "hidden_size_per_layer_input", 256) if family.kind == "Gemma4" else 0
    blocks = [replace(block, count=count) for block, count in counts.items()]
    if width:  # Gemma 4 has an embedding for each layer, and a projection of the first embedding to the same width
        projection = Linear("per_layer_model_projection", shape.hidden, width, False)
        blocks.append(Block(1, ((projection,),), 0, others=width // shape.layers, carried=2 * width))
    return replace(shape, kinds=tuple(blocks), beside=_number(settings, "vocab_size_per_layer_input", 262144) * width)


def _lfm2_width(width: int, settings: Mapping[str, Any]) -> int:
    width = _number(settings, "block_ff_dim", width)
    if not settings.get("block_auto_adjust_ff_dim", True):
        return width
    factor = settings.get("block_ffn_dim_multiplier", 1.0)
    width, multiple = 2 * width // 3, max(1, _number(settings, "block_multiple_of", 256))
    return width if factor is None else multiple * -(-int(factor * width) // multiple)


def _usual_kinds(shape: Shape, settings: Mapping[str, Any]) -> list[str]:
    """Return the kinds of layers for a config.json without a valid list of them."""
    indices = range(shape.layers)
    if shape.family.kind == "Lfm2":
        attends = settings.get("full_attn_idxs") or indices
        return [FULL if index in attends else CONV for index in indices]
    patterns = {"Qwen3_5": (DELTA, _number(settings, "full_attention_interval", 4)), "Gemma4": (SLIDING, 6)}
    other, every = patterns.get(shape.family.kind, (FULL, 1))
    return [other if (index + 1) % max(1, every) else FULL for index in indices]


def _block(shape: Shape, kind: str, index: int, settings: Mapping[str, Any]) -> Block:
    if shape.family.kind == "Gemma4":
        return _of_gemma4(shape, kind, index, settings)
    if kind == CONV:
        return _convolution(shape, settings)
    if kind == DELTA:
        return _gated_delta(shape, settings)
    dense, every = settings.get("mlp_only_layers") or (), max(1, _number(settings, "decoder_sparse_step", 1))
    if shape.family.mixture and index not in dense and (index + 1) % every == 0:
        return _mixture(shape, settings)
    return shape.block()


def _convolution(shape: Shape, settings: Mapping[str, Any]) -> Block:
    hidden, kernel, bias = shape.hidden, _number(settings, "conv_L_cache", 3), bool(settings.get("conv_bias"))
    inner, out = Linear("in_proj", hidden, 3 * hidden, bias), Linear("out_proj", hidden, hidden, bias)
    mixer, others = ((inner,), (out,)), hidden * (kernel + bias + shape.family.block_norms)
    return shape.block(
        projections=(*mixer, *shape.feed_forward(shape.intermediate)),
        queries=0,
        keys=0,
        others=others,
        inputs=hidden * (kernel - 1),
        mixed=5 * hidden,
    )


def _gated_delta(shape: Shape, settings: Mapping[str, Any]) -> Block:
    """Return a block with the gated delta rule. What it saves for the backward pass was fitted to eight sizes."""
    hidden, heads = shape.hidden, _number(settings, "linear_num_value_heads", 32)
    key_size, value_size = (_number(settings, f"linear_{kind}_head_dim", 128) for kind in ("key", "value"))
    keys, values = _number(settings, "linear_num_key_heads", 16) * key_size, heads * value_size
    channels, kernel = 2 * keys + values, _number(settings, "linear_conv_kernel_dim", 4)
    outputs = {"in_proj_qkv": channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
    inner = tuple(Linear(name, hidden, size, False) for name, size in outputs.items())
    out = Linear("out_proj", values, hidden, False)
    return shape.block(
        projections=(inner, (out,), *shape.feed_forward(shape.intermediate)),
        queries=0,
        keys=0,
        others=channels * kernel + 2 * heads + value_size + 2 * hidden,
        inputs=channels * (kernel - 1),
        matrix=heads * key_size * value_size,
        mixed=2 * channels,
        mixing=heads * (32 * key_size + 26 * value_size + 20.5 * CHUNK + 4 * key_size * value_size / CHUNK),
    )


def _of_gemma4(shape: Shape, kind: str, index: int, settings: Mapping[str, Any]) -> Block:
    """Return a block of Gemma 4: global attention has its own head size, and the last layers reuse earlier keys."""
    sizes: Mapping[str, Any] = {}
    has_keys = index < shape.layers - _number(settings, "num_kv_shared_layers")
    if isinstance(by_layer := settings.get("per_layer_config"), Mapping):
        sizes = by_layer.get(str(index)) or {}
    elif kind == FULL:
        keys = _number(settings, "num_global_key_value_heads") if settings.get("attention_k_eq_v") else 0
        sizes = {"head_dim": _number(settings, "global_head_dim", 512), "num_key_value_heads": keys or shape.kv_heads}
    has_values = has_keys and not (settings.get("attention_k_eq_v") and kind == FULL)
    head_size, kv_heads = sizes.get("head_dim", shape.head_size), sizes.get("num_key_value_heads", shape.kv_heads)
    shape = replace(shape, head_size=head_size, kv_heads=kv_heads)
    exists = {"q_proj": True, "k_proj": has_keys, "v_proj": has_values}
    heads, out = shape.attention
    width = shape.intermediate * (1 + (bool(settings.get("use_double_wide_mlp")) and not has_keys))
    projections = [tuple(head for head in heads if exists[head.name]), out, *shape.feed_forward(width)]
    others = shape.family.block_norms * shape.hidden + shape.head_size * (1 + has_keys)
    if inputs := _number(settings, "hidden_size_per_layer_input", 256):
        projections.append((Linear("per_layer_input_gate", shape.hidden, inputs, False),))
        projections.append((Linear("per_layer_projection", inputs, shape.hidden, False),))
        others += shape.hidden
    return shape.block(projections=tuple(projections), mlp=3 * width, caches=has_keys, others=others)


def _mixture(shape: Shape, settings: Mapping[str, Any]) -> Block:
    """Return a block with experts. They get no adapter, and bitsandbytes does not quantise them."""
    hidden, is_oss = shape.hidden, shape.family.mixture == "gpt_oss"
    experts = _number(settings, "num_local_experts") or _number(settings, "num_experts", 128)
    chosen = _number(settings, "num_experts_per_tok", 8)
    width = _number(settings, "moe_intermediate_size", shape.intermediate if is_oss else 768)
    plain = shape.block()
    return replace(
        plain,
        projections=shape.attention,
        mlp=chosen * ((6 if is_oss else 3) * width + hidden),
        others=plain.others + experts * (hidden + is_oss) + shape.heads * is_oss,  # a router, and sinks of attention
        expert=3 * hidden * width + (2 * width + hidden) * is_oss,
        experts=experts,
        chosen=min(chosen, experts),
    )
