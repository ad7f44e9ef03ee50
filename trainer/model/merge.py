"""Merges an adapter into its base, which gives a model that needs no PEFT.

The weights are read, merged and written one after the other: memory is needed for one file of the result, not for the
model. Only a base whose files have other names or shapes than its layers is loaded as a whole.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from trainer.config.settings import Model
from trainer.machine import disk, manifest
from trainer.model import hub, lora
from trainer.model.load import DTYPES, TEXT_PART, WithoutSympy, load_model, load_tokenizer, location, text_part

SHARD_BYTES = 1 << 30  # of a file that is written
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # of a number, by the type's name in safetensors
Progress = Callable[[str, int], AbstractContextManager[Any]]  # of a task with so many parts
WRAPPED = "base_model.model."  # before the names of a model with an adapter


def write_merged(
    settings: Model, adapter: Path | None, out: Path, dtype: str | None, progress: Progress | None = None
) -> None:
    """Merge an adapter, if any, into the unquantised base, and write it with its tokenizer."""
    whole = ["merge", "--adapter", str(adapter)] if adapter else ["export", settings.name, "--to", "safetensors"]
    remedy = f"Make room, or {shlex.join(['octet', *whole])} --out FOLDER, on another disk."
    weights = stored_weights(settings.clean, adapter, DTYPES[dtype] if dtype else None)
    for link in filter(Path.is_symlink, out.rglob("*")):  # it would lead what is written elsewhere
        link.unlink()
    if weights is None:
        model = load_model(settings.clean, dtype or "bf16", torch.device("cpu"))
        model = lora.merged(model, adapter) if adapter else model
        with disk.writing(out, "the merged model", remedy, needed=model.get_memory_footprint()):
            model.save_pretrained(str(out))
    else:
        needed = sum(weights.bytes.values())
        with disk.writing(out, "the merged model", remedy, needed=needed), weights.counted(progress, "merging"):
            weights.save(out)
    with disk.writing(out, "the merged model", remedy):
        disk.follow_umask(*out.glob("*.safetensors"))
        load_tokenizer(settings).save_pretrained(str(out))
        manifest.seal(out)


class Weights(Mapping[str, Tensor]):
    """A model's weights by name, each read and merged when it is asked for, in the stored precision without a dtype."""

    def __init__(self, model: Any, dtype: torch.dtype | None) -> None:
        self.model, self.dtype, self.config = model, dtype, model.config
        self.layers = {name.removeprefix(WRAPPED): layer for name, layer in lora.layers(model)}
        parameters, stored = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
        buffers = [(name, stored[name]) for name in stored.keys() - parameters.keys()]
        self.shapes = {
            name.removeprefix(WRAPPED).replace(".base_layer.", "."): value.shape
            for name, value in (*model.named_parameters(), *sorted(buffers))
            if "lora_" not in name
        }
        self.files: dict[str, tuple[Path, str]] = {}  # where a weight is stored, and under which name
        self.bytes: dict[str, int] = {}
        self._when_read: Callable[[], object] = lambda: None

    @contextmanager
    def counted(self, progress: Progress | None, task: str) -> Iterator[None]:
        """Show how many of the weights have been read."""
        if progress:
            with progress(task, len(self)) as shown:
                self._when_read = shown.advance
                yield
            self._when_read = lambda: None
        else:
            yield

    @property
    def embedding(self) -> str:
        return self._name_of(self.model.get_input_embeddings())

    def find(self, folder: Path, was_tied: bool) -> bool:
        """Find the weights in the safetensors of a folder. False if one is missing, or stored in another way."""
        stored = {}
        for file in (folder / name for name in hub.wanted(os.listdir(folder)) if name.endswith(".safetensors")):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118  it is no dictionary
                    part = weights.get_slice(name)
                    facts = torch.Size(part.get_shape()), BYTES.get(part.get_dtype())
                    stored[_in_text_model(name)] = file, name, *facts
        for name, shape in self.shapes.items():
            place = next((one for one in self._names_of(name, was_tied) if one in stored), None)
            if place is None or stored[place][2] != shape or stored[place][3] is None:
                return False
            self.files[name] = stored[place][:2]
            self.bytes[name] = shape.numel() * (self.dtype.itemsize if self.dtype else stored[place][3])
        return True

    def _names_of(self, name: str, was_tied: bool) -> list[str]:
        """Return the names under which a weight may be stored: with the decoder's or without, or the embedding's."""
        prefix = f"{self.model.base_model_prefix}." if self.model.base_model_prefix else ""
        names = [name]
        if was_tied and name == self._name_of(self.model.get_output_embeddings()):
            names.append(self._name_of(self.model.get_input_embeddings()))
        return [form for one in names for form in (one, one.removeprefix(prefix), f"{prefix}{one}")]

    def _name_of(self, module: nn.Module) -> str:
        found = next(name for name, part in self.model.named_modules() if part is module)
        return f"{found.removeprefix(WRAPPED)}.weight"

    def __getitem__(self, name: str) -> Tensor:
        self._when_read()
        owner, _, kind = name.rpartition(".")
        if owner in self.layers:
            return self._merged(owner, kind).to(self.dtype or self._stored(name).dtype)
        stored = self._stored(name)
        return stored.to(self.dtype or stored.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def _stored(self, name: str) -> Tensor:
        file, stored = self.files[name]
        with safe_open(file, "pt") as weights:
            found: Tensor = weights.get_tensor(stored)
        return found

    def _merged(self, owner: str, kind: str) -> Tensor:
        """Return a weight of a layer with an adapter, computed in fp32 and rounded once, by the caller."""
        layer = self.layers[owner]
        base = layer.get_base_layer()
        empty = dict(base.named_parameters())
        for name in empty:
            setattr(base, name, nn.Parameter(self._stored(f"{owner}.{name}").float(), requires_grad=False))
        try:
            layer.merge(safe_merge=True)
            merged: Tensor = getattr(base, kind).data
        finally:
            layer.merged_adapters.clear()
            for name, parameter in empty.items():
                setattr(base, name, parameter)
        return merged

    def save(self, out: Path) -> None:
        """Write all weights, in several files and an index if they are many, and the configuration."""
        out.mkdir(parents=True, exist_ok=True)
        naming: dict[str, Any] = {"filename_pattern": "model{suffix}.safetensors", "max_shard_size": SHARD_BYTES}
        split = split_state_dict_into_shards_factory(self.bytes, get_storage_size=int, **naming)
        for file, names in split.filename_to_tensors.items():
            save_file({name: self[name].contiguous() for name in names}, out / file, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        self.config.dtype = self.dtype or self.config.dtype
        self.config.save_pretrained(out)
        self.model.generation_config.save_pretrained(out)


def stored_weights(settings: Model, adapter: Path | None, dtype: torch.dtype | None) -> Weights | None:
    """Return the weights of a model, or None if its files or the adapter cannot be read one by one."""
    found = Path(location(settings))
    folder = found if found.is_dir() else hub.snapshot(settings)
    if folder is None or settings.trust_remote_code or (adapter and lora.replaces_weights(adapter)):
        return None
    model = _weightless(folder)
    was_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    adapted = lora.load_untied(model, adapter) if adapter else model
    weights = Weights(adapted, dtype)
    return weights if weights.find(folder, was_tied) else None


def _in_text_model(stored: str) -> str:
    """Return the name of a weight in the text model, if it is that of one that also reads images or sound."""
    return next((re.sub(*parts, stored) for parts in TEXT_PART.items() if re.match(parts[0], stored)), stored)


def _weightless(folder: Path) -> Any:
    """Return a model whose weights have their shapes, and one number each."""
    config = AutoConfig.from_pretrained(folder)
    config = text_part(config) or config
    with WithoutSympy(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(number, requires_grad=False))
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
