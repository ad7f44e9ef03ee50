"""Merge an adapter into its base. The result is a model that needs no PEFT.

Weights are read, merged and written one by one, so memory is needed for one file of the result, not for the whole
model. Only a base whose files have other names or shapes than its layers is loaded completely.
"""

import json
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
from trainer.model import hub, load, lora
from trainer.model.load import DTYPES, TEXT_PART, load_model, load_tokenizer, location, text_part

SHARD_BYTES = 1 << 30  # size of a written file
BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}  # bytes of a number by safetensors' name of its type
Progress = Callable[[str, int], AbstractContextManager[Any]]  # called with a task and its number of parts
WRAPPED = "base_model.model."  # prefix of the names in a model with an adapter


def write_merged(
    settings: Model, adapter: Path | None, out: Path, dtype: str | None, progress: Progress | None = None
) -> None:
    """Merge an adapter, if any, into the unquantised base, and write it with its tokenizer."""
    command = ["merge", "--adapter", str(adapter)] if adapter else ["export", settings.name, "--to", "safetensors"]
    remedy = f"Make room, or {shlex.join(['octet', *command])} --out FOLDER, on another disk."
    weights = stored_weights(settings.clean, adapter, DTYPES[dtype] if dtype else None)
    for path in out.rglob("*"):  # writing through a link would change another file, and earlier weights might be read
        if path.is_symlink() or ".safetensors" in path.name or path.name == "export.json":  # of an earlier model
            path.unlink()
    if weights is None:
        model = load_model(settings.clean, dtype or load.stored_dtype(settings), torch.device("cpu"))
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
    """A model's weights by name, each read and merged on access. Without a dtype they keep the stored precision."""

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
        self.files: dict[str, tuple[Path, str]] = {}  # the file of each weight, and its name there
        self.bytes: dict[str, int] = {}
        self._when_read: Callable[[], object] = lambda: None

    @contextmanager
    def counted(self, progress: Progress | None, task: str) -> Iterator[None]:
        """Show the share of the weights that have been read."""
        if progress is None:
            yield
            return
        with progress(task, len(self)) as shown:
            self._when_read = shown.advance
            yield
        self._when_read = lambda: None

    @property
    def embedding(self) -> str:
        return self._name_of(self.model.get_input_embeddings())

    def find(self, folder: Path, was_tied: bool) -> bool:
        """Find the weights in the safetensors of a folder. Return False if one is missing or has another format."""
        stored = {}
        for file in (path for path in hub.weights(folder) if path.suffix == ".safetensors"):
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118  it is no dictionary
                    part = weights.get_slice(name)
                    facts = torch.Size(part.get_shape()), BYTES.get(part.get_dtype())
                    text = (re.sub(*parts, name) for parts in TEXT_PART.items() if re.match(parts[0], name))
                    stored[next(text, name)] = file, name, *facts  # files of multimodal models have other names
        for name, shape in self.shapes.items():
            entry = next((stored[alias] for alias in self._names_of(name, was_tied) if alias in stored), None)
            if entry is None or entry[2] != shape or entry[3] is None:
                return False
            self.files[name] = entry[:2]
            self.bytes[name] = shape.numel() * (self.dtype.itemsize if self.dtype else entry[3])
        return True

    def _names_of(self, name: str, was_tied: bool) -> list[str]:
        """Return the names under which a weight may be stored: with or without a prefix, or as the embedding."""
        prefix = f"{self.model.base_model_prefix}." if self.model.base_model_prefix else ""
        names = [name]
        if was_tied and name == self._name_of(self.model.get_output_embeddings()):
            names.append(self.embedding)
        return [form for alias in names for form in (alias, alias.removeprefix(prefix), f"{prefix}{alias}")]

    def _name_of(self, module: nn.Module) -> str:
        path = next(name for name, part in self.model.named_modules() if part is module)
        return f"{path.removeprefix(WRAPPED)}.weight"

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
            return weights.get_tensor(stored)

    def _merged(self, owner: str, kind: str) -> Tensor:
        """Return a weight of a layer with an adapter, in fp32, so that it is rounded only once, by the caller."""
        layer = self.layers[owner]
        base = layer.get_base_layer()
        empty = dict(base.named_parameters())
        for name in empty:
            setattr(base, name, nn.Parameter(self._stored(f"{owner}.{name}").float(), requires_grad=False))
        try:
            layer.merge(safe_merge=True)
            return getattr(base, kind).data
        finally:
            layer.merged_adapters.clear()
            for name, parameter in empty.items():
                setattr(base, name, parameter)

    def save(self, out: Path) -> None:
        """Write all weights, in several files with an index if they are large, and the configuration."""
        out.mkdir(parents=True, exist_ok=True)
        naming: dict[str, Any] = {"filename_pattern": "model{suffix}.safetensors", "max_shard_size": SHARD_BYTES}
        split = split_state_dict_into_shards_factory(self.bytes, get_storage_size=int, **naming)
        for file, names in split.filename_to_tensors.items():
            tensors = {name: self[name].contiguous() for name in names}
            save_file(tensors, out / file, {"format": "pt"})
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        self.config.dtype = self.dtype or self.config.dtype or tensors[names[0]].dtype
        self.config.save_pretrained(out)
        self.model.generation_config.save_pretrained(out)


def stored_weights(settings: Model, adapter: Path | None, dtype: torch.dtype | None) -> Weights | None:
    """Return the weights of a model; None if the weights in its files or of the adapter cannot be read one by one."""
    path = Path(location(settings))
    folder = path if path.is_dir() else hub.snapshot(settings)
    if folder is None or settings.trust_remote_code or (adapter and lora.replaces_weights(adapter)):
        return None
    model = _weightless(folder)
    was_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    adapted = lora.load_untied(model, adapter) if adapter else model
    weights = Weights(adapted, dtype)
    return weights if weights.find(folder, was_tied) else None


def _weightless(folder: Path) -> Any:
    """Return a model whose weights have the right shapes, but each takes the memory of only one number."""
    config = AutoConfig.from_pretrained(folder)
    config = text_part(config) or config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            number = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            setattr(module, name, nn.Parameter(number, requires_grad=False))
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model
