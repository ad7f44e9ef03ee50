"""Compare the weights of a model with its config.json, and name the key that contradicts them.

transformers initialises missing weights at random, and ignores unexpected ones.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.errors import ModelError, counted

OF_A_LAYER = re.compile(r"(\D*\.)(\d+)\.(.+)")  # such as model.layers.3.mlp.up_proj.weight
SIZES = (  # a weight, one of its axes, and the key that sets its size; a wrong key also changes weights further down
    (r"(embed_tokens|wte|embed_in)\.weight", 1, "hidden_size"),
    (r"(embed_tokens|wte|embed_in)\.weight", 0, "vocab_size"),
    (r"k_(layer)?norm\.weight", 0, "head_dim"),
    (r"q_proj\.weight", 0, "num_attention_heads"),
    (r"k_proj\.weight", 0, "num_key_value_heads"),
    (r"experts\.down_proj", 0, "num_experts"),
    (r"experts\.down_proj", 2, "moe_intermediate_size"),
    (r"experts\.down_proj", 2, "intermediate_size"),
    (r"experts\.down_proj", 1, "intermediate_size"),
    (r"(gate|up)_proj\.weight", 0, "intermediate_size"),
)


def check(name: str, model: Any, facts: Mapping[str, Any]) -> None:
    """Raise ModelError if a model differs from its files. `facts` is the loading info of transformers."""
    if reason := next(_contradictions(model, facts), None):
        raise ModelError(f"model.name={name}", reason, "Download the model again, or correct its config.json")


def _contradictions(model: Any, facts: Mapping[str, Any]) -> Iterator[str]:
    config, missing, unlike = model.config.get_text_config(), {*facts["missing_keys"]}, sorted(facts["mismatched_keys"])
    parameters = dict(model.named_parameters())
    stacks = {match[1] for name in parameters if (match := OF_A_LAYER.match(name))}
    strange = {name for name in facts["unexpected_keys"] if (match := OF_A_LAYER.match(name)) and match[1] in stacks}
    stored = {int(match[2]) for name in parameters.keys() - missing | strange if (match := OF_A_LAYER.match(name))}
    layers = config.to_dict().get(config.attribute_map.get("num_hidden_layers", "num_hidden_layers"))
    if layers and len(stacks) == 1 and stored and max(stored) + 1 != layers:
        yield _says(config, "num_hidden_layers", f"its files have the weights of {counted(max(stored) + 1, 'layer')}")
    for name in sorted(missing):
        layer = OF_A_LAYER.match(name)
        others = sorted(other for other in strange if layer and other.startswith(f"{layer[1]}{layer[2]}."))
        if layer and others and config.to_dict().get("layer_types"):
            yield _says(config, "layer_types", f"its files have {others[0]} and no {name}", int(layer[2]))
    for pattern, axis, key in SIZES:
        value = config.to_dict().get(config.attribute_map.get(key, key))  # attributes may differ from layer to layer
        for name, filed, configured in unlike:
            if isinstance(value, int) and re.search(pattern, name) and filed[axis] != configured[axis]:
                whole, rest = divmod(value * filed[axis], configured[axis])
                if not rest and not configured[axis] % value:
                    yield _says(config, key, f"{name} in its files makes it {whole}")
    yield from _too_few_experts(config)
    if unlike:
        name, filed, configured = unlike[0]
        yield f"{name} has the shape {_shape(filed)} in its files, and {_shape(configured)} by its config.json"
    head = getattr(model.get_output_embeddings(), "weight", None)
    if missing and all(parameters.get(name) is head for name in missing):
        yield _says(config, "tie_word_embeddings", f"its files have no {min(missing)}")
    if missing:
        yield f"its files lack {min(missing)}, which its config.json implies; {len(missing)} are missing"
    if strange:
        yield f"its files have {min(strange)}, which is no weight of the model that its config.json describes"
    if model._tied_weights_keys and config.tie_word_embeddings and head is not model.get_input_embeddings().weight:
        yield _says(config, "tie_word_embeddings", "its files have an output layer that is not the embedding")


def _too_few_experts(config: Any) -> Iterator[str]:
    experts = getattr(config, "num_experts", None) or 0
    if experts and experts < (getattr(config, "num_experts_per_tok", None) or 0):
        yield _says(config, "num_experts_per_tok", f"a layer has {counted(experts, 'expert')}")


def _says(config: Any, key: str, contradiction: str, index: int | None = None) -> str:
    name = config.attribute_map.get(key, key)
    value = config.to_dict()[name]
    if index is not None:
        name, value = f"{name}[{index}]", value[index]
    return f"{name} is {str(value).lower()} in its config.json, and {contradiction}"


def _shape(size: Any) -> str:
    return " x ".join(map(str, size))
