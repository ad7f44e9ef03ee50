"""Merges an adapter into its base, which gives a model that needs no PEFT."""

from __future__ import annotations

from pathlib import Path

import torch

from trainer.config.settings import Model
from trainer.machine import disk
from trainer.model import lora
from trainer.model.load import load_model, load_tokenizer


def merge(settings: Model, adapter: Path, out: Path, dtype: str) -> None:
    """Merge an adapter into the unquantised base on the CPU, and write the model with its tokenizer."""
    model = lora.merged(load_model(settings.clean, dtype, torch.device("cpu")), adapter)
    remedy = f"The adapter is whole: make room, or octet merge --adapter {adapter} --out FOLDER, on another disk."
    with disk.writing(out, "the merged model", remedy, needed=model.get_memory_footprint()):
        model.save_pretrained(str(out))
        disk.follow_umask(*out.glob("*.safetensors"))
        load_tokenizer(settings).save_pretrained(str(out))
