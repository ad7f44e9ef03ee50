"""step: what is trained. The base stays frozen; the adapter is a few MB beside it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import peft
import torch

from trainer.config import Lora
from trainer.errors import CheckpointError, ConfigError

TARGETS: dict[str, Any] = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "all": "all-linear"}


def add_adapter(model: Any, settings: Lora) -> Any:
    """The model with fresh, trainable LoRA layers. B starts at zero, so it computes what the base computes."""
    wanted = list(settings.targets) if isinstance(settings.targets, tuple) else TARGETS[settings.targets]
    options = peft.LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=wanted,
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, options)
    except ValueError as error:  # PEFT found none of the modules
        names = sorted(
            {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        )
        raise ConfigError(
            f"lora.targets={settings.targets}: this model has no such layers. Its linear ones are {', '.join(names)}. "
            "Write lora.targets=all or name some of them."
        ) from error


def load_adapter(model: Any, folder: Path) -> Any:
    """The model with the adapter of a run, for reading only."""
    try:
        return peft.PeftModel.from_pretrained(model, str(folder))
    except (OSError, RuntimeError, ValueError) as error:  # a file is missing, a shape differs, a module is not there
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"{folder}: it does not fit this model ({reason}). Name the base that it was trained on; it stands in "
            "adapter_config.json."
        ) from error


def merged(model: Any, folder: Path) -> Any:
    return load_adapter(model, folder).merge_and_unload(safe_merge=True)


def save_adapter(model: Any, folder: Path) -> None:
    with (
        warnings.catch_warnings()
    ):  # PEFT asks the hub whether the vocabulary changed; it did not, and there may be no hub
        warnings.simplefilter("ignore", UserWarning)
        model.save_pretrained(str(folder), save_embedding_layers=False)


def fingerprint(model: Any) -> float:
    """A number that changes when the adapter does: a run whose adapter never moved is not a run."""
    with torch.no_grad():
        return sum(float(part.double().abs().sum()) for part in model.parameters() if part.requires_grad)
