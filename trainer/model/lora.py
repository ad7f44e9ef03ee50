"""The adapter: a few MB of parameters that are trained on top of a frozen base.

PiSSA also changes the base, because it moves the principal part of each weight into the adapter. The run nevertheless
exports an adapter of the original base: the learned difference, B A - B0 A0 = [B, -B0] [A; A0].
"""

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer, ParamWrapper
from safetensors import SafetensorError
from torch import Tensor

from trainer.config.sections.model import OF_EXPERTS
from trainer.config.settings import Lora
from trainer.errors import CheckpointError, ConfigError, MergeError, ModelError
from trainer.machine import disk, manifest
from trainer.machine.out_of_memory import is_out_of_memory
from trainer.machine.safe_text import visible
from trainer.model.hub import read_json
from trainer.model.load import LONGEST_REASON, reason_of
from trainer.model.quantised import READ

ADAPTER = "default"  # PEFT's name for the first adapter
TEACHER = "teacher"  # a second adapter over the same base, which is never trained
SLOW = "PEFT would multiply out the adapters of all experts in each pass: sampling a token takes 5 to 11 times as long"
KEEP_BASE = ("True", "False", "None", "gaussian", "eva", "orthogonal", "mica")  # values of init_lora_weights
UNLIKE = ("Router", "GroupedLinear")  # linear layers that return several values, or have smaller inputs
RENAMED = "sconv.weight_proj"  # a layer of Inkling 2, whose adapter PEFT would load under another name
MAMBAS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")  # they also read the weights of out_proj


def experts_of(model: Any) -> list[str]:
    """Return the names of the parameters that hold all experts of a layer and are no linear layers."""
    return [name for name, value in model.named_parameters() if value.dim() == 3 and ".experts." in name]


def add_adapter(model: Any, settings: Lora, revision: str | None = None) -> Any:
    """Return the model with LoRA layers: new ones, which do not change its results yet, or those of `lora.start`. The
    adapter names this revision of its base, because PEFT would load it over the newest one."""
    shape = {"r": settings.r, "lora_alpha": settings.alpha, "use_rslora": settings.rslora, "use_dora": settings.dora}
    options = peft.LoraConfig(target_modules=_targets(model, settings), task_type="CAUSAL_LM", **shape)
    try:
        with _without_warnings():
            adapted = peft.get_peft_model(model, options, revision=revision)
        if any(isinstance(layer, ParamWrapper) for _, layer in layers(adapted)):
            raise ValueError(SLOW)
    except ValueError as error:
        remedy = f"Write lora.targets={'attention' if settings.targets == 'all' else 'all or attention'}"
        raise ConfigError(settings.named_targets, reason_of(error), remedy) from None
    if settings.init != "zero":
        _init_pissa(adapted, settings)
    if settings.start is not None:
        take_values(adapted, settings.start)
    return adapted


def _targets(model: Any, settings: Lora) -> str | list[str]:
    """Return the target modules for PEFT. Raise ConfigError for a target that names no layer, which PEFT ignores if
    another target names one, and for a target that names a parameter with all experts of a layer."""
    experts, modules = experts_of(model), dict(model.named_modules())
    whole = {name: part for name, part in modules.items() if isinstance(part, torch.nn.Linear)}
    users = Counter(id(part.weight) for part in whole.values())  # one weight cannot take two adapters, as in Zamba2
    reserved = (*(OF_EXPERTS if experts else ()), *(["out_proj"] if model.config.model_type in MAMBAS else ()))
    linear = {
        name: part
        for name, part in whole.items()
        if users[id(part.weight)] == 1
        and not type(part).__name__.endswith(UNLIKE)
        and not name.endswith((*READ, RENAMED))
        and name.rpartition(".")[2] not in reserved
    }
    if settings.targets == "all" and linear == whole and not experts:
        return "all-linear"
    attentions = tuple(f"{name}." for name, part in modules.items() if type(part).__name__.endswith("Attention"))
    targets = [*settings.targets]
    if isinstance(settings.targets, str):
        inside = [name for name in linear if name.startswith(attentions) or settings.targets == "all"]
        targets = sorted(name for name in inside if linear[name] is not model.get_output_embeddings()) or ["q_proj"]
        ends = {name.rpartition(".")[2] for name in targets}
        if settings.targets == "attention" and len(targets) == sum(name.rpartition(".")[2] in ends for name in whole):
            targets = sorted(ends)  # not in LFM2, whose convolutions have an out_proj, too
    parts = {f".{part}" for name in experts for part in (name, name.rpartition(".")[0])}
    if any(name.endswith(f".{target}") for name in parts for target in targets):
        raise ConfigError(settings.named_targets, SLOW, "Write lora.targets=all, which leaves them out")
    known = modules.keys() - (whole.keys() - linear.keys())
    if missing := [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in known)]:
        raise ConfigError(settings.without_layer(missing, sorted({name.rpartition(".")[2] for name in linear})))
    return targets


def _init_pissa(model: Any, settings: Lora) -> None:
    """Initialise PiSSA. The factors are rounded first, as the engine does, so that base and adapter add up exactly."""
    tied = _tied_weight(model.get_base_model())
    for name, layer in layers(model):
        weight = layer.get_base_layer().weight
        if weight is tied or isinstance(layer.get_base_layer(), torch.nn.Embedding):
            what = "shares its weight with another layer" if weight is tied else "is an embedding"
            reason = f"PiSSA moves a part of each weight into the adapter, and {name} {what}"
            remedy = "Leave it out of lora.targets, or write lora.init=zero"
            raise ConfigError(f"lora.init={settings.init}", reason, remedy)
        if settings.r > min(weight.shape):
            shape = " x ".join(map(str, weight.shape))
            reason = f"lora.init={settings.init} takes singular vectors of each weight, and {name} is {shape}"
            raise ConfigError(f"lora.r={settings.r}", reason, f"Write lora.r={min(weight.shape)} or less")
        whole = weight.data.clone()
        layer.pissa_init(ADAPTER, settings.init)
        for factor in (layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight):
            factor.data = factor.data.to(weight.dtype).float()
        weight.data = _without_adapter(whole, layer)


@torch.no_grad()
def restore_first_factors(model: Any, start: Mapping[str, Tensor]) -> None:
    """Replace PiSSA's initial factors by those of a checkpoint, and adjust the base so that the sum stays the same."""
    trained = trainable(model)
    for name, layer in layers(model):
        weight = layer.get_base_layer().weight
        factors = {key: value.to(weight.device) for key, value in start.items() if key.startswith(f"{name}.lora_")}
        if all(torch.equal(trained[key], value) for key, value in factors.items()):
            continue  # the same machine computes the same factors, so nothing has to be rounded again
        whole = weight.data.float() + layer.get_delta_weight(ADAPTER).float()
        for key, value in factors.items():
            trained[key].copy_(value)
        weight.data.copy_(_without_adapter(whole, layer))


@torch.no_grad()
def _without_adapter(whole: Tensor, layer: Any) -> Tensor:
    return (whole.float() - layer.get_delta_weight(ADAPTER).float()).to(layer.get_base_layer().weight.dtype)


def layers(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, LoraLayer))


def load_adapter(model: Any, folder: Path, name: str = ADAPTER, setting: str | None = None) -> Any:
    """Return the model with one more, frozen adapter. Raise CheckpointError if it is not a LoRA of this model."""
    called = f"{setting}={folder}" if setting else str(folder)
    config, saved = _read(folder, called)
    base = model.get_base_model() if isinstance(model, peft.PeftModel) else model

    def no_fit(reason: str) -> CheckpointError:
        trained_over = visible(str(config.get("base_model_name_or_path")))[:LONGEST_REASON]
        remedy = f"It was trained over {trained_over}: name that base, or merge it with PEFT if its vocabulary grew"
        return CheckpointError(called, f"it does not fit {base.name_or_path} ({reason})", remedy)

    mapping = config["auto_mapping"] if isinstance(config.get("auto_mapping"), dict) else {}  # some adapters lack it
    kind = type(base).__name__
    if (needed := str(mapping.get("base_model_class", kind))) != kind:
        raise no_fit(f"which is a {kind}, and not a {visible(needed)[:100]}")
    try:
        with _without_warnings():
            if isinstance(model, peft.PeftModel):
                model.load_adapter(str(folder), name)
            adapted = model if isinstance(model, peft.PeftModel) else peft.PeftModel.from_pretrained(model, str(folder))
    except Exception as error:  # PEFT raises errors of every class for invalid files
        if is_out_of_memory(error):
            raise
        raise no_fit(reason_of(error)) from error
    loaded = peft.get_peft_model_state_dict(adapted, adapter_name=name, save_embedding_layers=False)
    # a weight that PEFT has left out, because transformers gives it another name, is still zero
    left_out = {name for name in loaded.keys() & saved.keys() if bool(loaded[name].any()) != bool(saved[name].any())}
    if unmatched := sorted(name for name in loaded.keys() ^ saved.keys() | left_out if "lora_" in name):
        raise no_fit(f"{len(unmatched)} weights are in only one of them, the first of them {unmatched[0]}")
    return adapted


def add_teacher(model: Any, folder: Path) -> None:
    """Add the teacher's adapter to a model with a trained adapter. Only `as_teacher` activates it."""
    load_adapter(model, folder, TEACHER, "teacher.adapter")
    base = model.get_base_model()
    ends = (base.get_input_embeddings(), base.get_output_embeddings())
    if replaces_weights(folder) or any(TEACHER in getattr(end, "scaling", ()) for end in ends):
        reason = "it adapts the embedding or the output layer, or has more than the factors of layers"
        remedy = "Merge it (octet merge), and name the merged model in teacher.name"
        raise CheckpointError(f"teacher.adapter={folder}", reason, remedy)


@contextmanager
def as_teacher(model: Any) -> Iterator[None]:
    """Compute with the teacher's adapter instead of the trained one."""
    model.set_adapter(TEACHER, inference_mode=True)
    try:
        yield
    finally:
        model.set_adapter(ADAPTER)


def take_values(model: Any, start: Path) -> None:
    """Give the model's adapter the values of `lora.start`. Raise CheckpointError if their shapes or scales differ."""
    called = f"lora.start={start}"
    config, saved = _read(start, called)
    # settings that the weights do not show
    for setting, key in {"alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}.items():
        here, there = getattr(model.peft_config[ADAPTER], key), config.get(key, False)
        if here != there:
            reason = f"it was trained with lora.{setting}={str(there).lower()}, and this run has {str(here).lower()}"
            raise CheckpointError(called, reason, f"Write lora.{setting}={str(there).lower()}")
    if config.get("rank_pattern") or config.get("alpha_pattern") or replaces_weights(start):
        reason = "it has a rank_pattern, an alpha_pattern, or more than the factors of layers"
        raise CheckpointError(called, reason, "Merge it (octet merge), and train the merged model")
    values = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    stored, wanted = ({name: value.shape for name, value in weights.items()} for weights in (saved, values))
    if unlike := sorted({name for name, _ in stored.items() ^ wanted.items()}):
        reason = f"{len(unlike)} of its {len(stored)} weights do not fit the section `lora`, such as {unlike[0]}"
        raise CheckpointError(called, reason, "Write the lora.r and lora.targets of its adapter_config.json")
    peft.set_peft_model_state_dict(model, saved)


def _read(folder: Path, called: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the configuration and the weights of a LoRA adapter. Raise CheckpointError if it is incomplete, which
    would make PEFT look for it on the hub, or invalid."""
    manifest.must_be_whole(folder)
    try:
        config = read_json(called, folder / "adapter_config.json")
    except ModelError as error:
        raise CheckpointError(str(error)) from None
    if not any((folder / f"adapter_model.{ending}").is_file() for ending in ("safetensors", "bin")):
        raise CheckpointError(called, "there is no adapter_model.safetensors in it", "Name the adapter of a run")
    kind = "LoRA of Megatron" if config.get("megatron_config") else str(config.get("peft_type"))[:100]
    if kind != "LORA":  # for Megatron's, PEFT would import a module that this file names
        reason = f"it is {kind}, and Octet reads only plain LoRA adapters"
        raise CheckpointError(called, reason, "Merge it with PEFT, and name the merged model")
    if (init := str(config.get("init_lora_weights", True))[:100]) not in KEEP_BASE:
        reason = f"init_lora_weights={visible(init)} changed the weights of the base that it was trained over"
        raise CheckpointError(called, reason, "Merge it with PEFT, and name the merged model")
    try:
        values = peft.utils.load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise CheckpointError(called, f"its weights cannot be read ({reason_of(error)})", "Take another") from None
    if broken := next((name for name, value in values.items() if not value.isfinite().all()), None):
        raise CheckpointError(called, f"{broken} has numbers that are not finite", "Take an earlier adapter")
    return config, values


def merged(model: Any, folder: Path) -> Any:
    """Return the base with the adapter added to its weights."""
    adapted = load_untied(model, folder)
    try:
        with _without_warnings():
            return adapted.merge_and_unload(safe_merge=True)
    except (RuntimeError, ValueError) as error:  # the base lacks a bias that the adapter has; NaN
        if is_out_of_memory(error):
            raise
        raise MergeError(folder, f"PEFT cannot merge it ({reason_of(error)})", "Use it as an adapter") from error


def load_untied(model: Any, folder: Path) -> Any:
    """Return the model with an adapter to merge. An output layer that shares the weight of the embedding gets its own
    parameter if one of them has an adapter, which would otherwise change both. The values remain shared until a safe
    merge replaces them."""
    adapted = load_adapter(model, folder)
    tied = _tied_weight(model)
    if tied is not None and any(getattr(layer.get_base_layer(), "weight", None) is tied for _, layer in layers(model)):
        output = model.get_output_embeddings()
        getattr(output, "base_layer", output).weight = torch.nn.Parameter(tied.detach())
        model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
    return adapted


def replaces_weights(folder: Path) -> bool:
    """Return True if an adapter has more than the factors of layers, so that PEFT has to merge the whole model."""
    config, saved = _read(folder, f"adapter {folder}")
    return any(map(config.get, ("target_parameters", "lora_bias"))) or any("lora_" not in name for name in saved)


def _tied_weight(model: Any) -> Any:
    """Return the weight that the embedding shares with the output layer; None if each has its own."""
    weight = model.get_input_embeddings().weight
    return weight if getattr(model.get_output_embeddings(), "weight", None) is weight else None  # 8 bits: no weight


CARD = """---
base_model: {base}
library_name: peft
tags: [lora, octet]
---

# A LoRA adapter of {base}

Rank {rank}, trained by Octet. Settings and evaluation are in the run folder: `config.yaml` and `eval.md`.

{usage}
`octet merge --adapter THIS_FOLDER --out NEW_FOLDER` writes the whole model.
"""
USAGE = """    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained("this folder")
"""
USAGE_OF_TEXT = r"""Its base is a {kind}, and it adapts the text model in it:

    from peft import PeftConfig, PeftModel
    from transformers import {kind}
    config = PeftConfig.from_pretrained("this folder")
    layers = sorted({{name.rpartition(".")[2] for name in config.target_modules}})
    config.target_modules = rf".*language_model\.(.*\.)?({{'|'.join(layers)}})"
    model = {kind}.from_pretrained(config.base_model_name_or_path, revision=config.revision)
    names = {{r"^model\.": "model.language_model."}}
    model = PeftModel.from_pretrained(model, "this folder", config=config, key_mapping=names)
"""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence PEFT's warnings of tied layers, which `load_untied` unties, and of missing weights, which are errors."""
    texts = ("Model has `tie_word_embeddings=True`", "Input and output embeddings", "Found missing adapter keys")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="|".join(texts))
        yield


def save_adapter(model: Any, folder: Path, values: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter in PEFT's format, with other values if `values` is given."""
    config = model.peft_config[ADAPTER]
    if isinstance(config.target_modules, set):  # each process has another order, and other runs compare the file
        config.target_modules = sorted(config.target_modules)
    # without embeddings, so PEFT does not ask the hub whether the vocabulary has changed
    model.save_pretrained(str(folder), save_embedding_layers=False, state_dict=values, selected_adapters=[ADAPTER])
    disk.follow_umask(*folder.glob("*.safetensors"))
    multimodal = getattr(model, "taken_from", None)
    usage = USAGE_OF_TEXT.format(kind=multimodal) if multimodal else USAGE
    (folder / "README.md").write_text(CARD.format(base=config.base_model_name_or_path, rank=config.r, usage=usage))


def save_difference(model: Any, start: Mapping[str, Tensor], folder: Path) -> None:
    """Write the difference to `start` as an adapter of the original base: [B, -B0] [A; A0]."""
    config = model.peft_config[ADAPTER]
    rank = 2 * config.r
    scale = config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)
    model.peft_config[ADAPTER] = replace(config, r=rank, lora_alpha=scale * rank, use_rslora=False)
    try:
        values = trainable(model)  # the magnitudes of DoRA stay unchanged
        for name, value in values.items():
            if "lora_A" in name:
                values[name] = torch.cat([value, start[name]], dim=0)
            elif "lora_B" in name:
                values[name] = torch.cat([value, -start[name]], dim=1)
        save_adapter(model, folder, values)
    finally:
        model.peft_config[ADAPTER] = config


def trainable(model: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def fingerprint(model: Any) -> float:
    """Return a number that changes with the trained parameters, to detect whether an update has changed anything."""
    return sum(float(value.double().abs().sum()) for value in trainable(model).values())
