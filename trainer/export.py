"""The adapter merged into its base: a model that runs anywhere without PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import torch

from trainer.config import Model
from trainer.errors import CheckpointError
from trainer.policy.base import load_model, load_tokenizer


def base_of(adapter: Path) -> str:
    """The name of the model that an adapter was trained on."""
    path = adapter / "adapter_config.json"
    if not path.is_file():
        raise CheckpointError(f"{adapter}: there is no adapter_config.json in it. Name the `adapter` folder of a run.")
    return str(json.loads(path.read_text())["base_model_name_or_path"])


def with_adapter(model: Any, adapter: Path) -> Any:
    return peft.PeftModel.from_pretrained(model, str(adapter))


def merge(settings: Model, adapter: Path, out: Path, dtype: str) -> None:
    """Merge on the CPU, into the clean base and once, and write the model with its tokenizer."""
    model = with_adapter(load_model(settings, dtype, torch.device("cpu")), adapter).merge_and_unload(safe_merge=True)
    model.save_pretrained(str(out))
    load_tokenizer(settings).save_pretrained(str(out))
