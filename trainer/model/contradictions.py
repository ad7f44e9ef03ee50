"""Compares the weights of a model with its config.json, and names the key that contradicts them.

transformers gives random numbers to weights that are missing, and leaves out those that have no place.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.errors import ModelError, counted

OF_A_LAYER = re.compile(r"(\D*\.)(\d+)\.(.+)")  # such as model.layers.3.mlp.up_proj.weight
SIZES = (  # an axis of a weight, and the key that decides about its size; a wrong one above changes weights below
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
    """Raise ModelError if a model is not the one in its files. `facts` is what transformers found while loading it."""
    if reason := next(_contradictions(model, facts), None):
        raise ModelError(f"model.name={name}", reason, "Download the model again, or correct its config.json")


def _contradictions(model: Any, facts: Mapping[str, Any]) -> Iterator[str]:
    config, missing, unlike = model.config.get_text_config(), {*facts["missing_keys"]}, sorted(facts["mismatched_keys"])
    own = dict(model.named_parameters())
    stacks = {found[1] for name in own if (found := OF_A_LAYER.match(name))}
    strange = {name for name in facts["unexpected_keys"] if (found := OF_A_LAYER.match(name)) and found[1] in stacks}
    stored = {int(found[2]) for name in own.keys() - missing | strange if (found := OF_A_LAYER.match(name))}
    if len(stacks) == 1 and stored and max(stored) + 1 != config.num_hidden_layers:
        yield _says(config, "num_hidden_layers", f"its files have the weights of {counted(max(stored) + 1, 'layer')}")
    for name in sorted(missing):
        layer = OF_A_LAYER.match(name)
        others = sorted(other for other in strange if layer and other.startswith(f"{layer[1]}{layer[2]}."))
        if layer and others and config.to_dict().get("layer_types"):
            yield _says(config, "layer_types", f"its files have {others[0]} and no {name}", int(layer[2]))
    for pattern, axis, key in SIZES:
        value = config.to_dict().get(config.attribute_map.get(key, key))  # attributes may differ from layer to layer
        for name, found, made in unlike:
            if isinstance(value, int) and re.search(pattern, name) and found[axis] != made[axis]:
                whole, rest = divmod(value * found[axis], made[axis])
                if not rest and not made[axis] % value:
                    yield _says(config, key, f"it is {whole} by {name} in its files")
    yield from _too_few_experts(config)
    if unlike:
        name, found, made = unlike[0]
        yield f"{name} has the shape {_shape(found)} in its files, and {_shape(made)} by its config.json"
    head = getattr(model.get_output_embeddings(), "weight", None)
    if missing and all(own.get(name) is head for name in missing):
        yield _says(config, "tie_word_embeddings", f"its files have no {min(missing)}")
    if missing:
        yield f"its files have no {min(missing)}, which a model of its config.json has; {len(missing)} are missing"
    if strange:
        yield f"its files have {min(strange)}, for which a model of its config.json has no place"
    if config.tie_word_embeddings and model._tied_weights_keys and head is not model.get_input_embeddings().weight:
        yield _says(config, "tie_word_embeddings", "its files have an output layer that is not the embedding")


def _too_few_experts(config: Any) -> Iterator[str]:
    experts = getattr(config, "num_experts", None) or 0
    if experts and experts < (getattr(config, "num_experts_per_tok", None) or 0):
        yield _says(config, "num_experts_per_tok", f"a layer has {counted(experts, 'expert')}")


def _says(config: Any, key: str, found: str, place: int | None = None) -> str:
    named = config.attribute_map.get(key, key)
    value = config.to_dict()[named]
    said = value if place is None else value[place]
    return f"{named}{'' if place is None else f'[{place}]'} is {str(said).lower()} in its config.json, and {found}"


def _shape(size: Any) -> str:
    return " x ".join(map(str, size))
