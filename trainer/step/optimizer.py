"""step: the optimizer, its parameter groups, and the learning rate over a run."""

import math
import re
from typing import Any

from trainer.config.settings import Config, Optim


def make_optimizer(model: Any, config: Config) -> Any:
    """Return the optimizer, with the peak learning rate in each parameter group."""
    groups, settings = parameter_groups(model, config), config.optim
    options: dict[str, Any] = {"betas": settings.betas, "weight_decay": settings.weight_decay}
    if settings.name == "adamw_8bit":
        import bitsandbytes  # takes seconds, so it is imported only if needed

        return bitsandbytes.optim.AdamW8bit(groups, **options)
    import torch

    if settings.name == "muon":  # the engine passes it updates; see `muon.py`
        return torch.optim.SGD(groups, weight_decay=settings.weight_decay)
    return torch.optim.AdamW(groups, fused=True, **options)


def parameter_groups(model: Any, config: Config) -> list[dict[str, Any]]:
    """Return one group, or two with LoRA+: the factors A, then the factors B."""
    ratio = config.lora.plus_ratio if config.lora.enabled else 1.0
    groups: dict[float, list[Any]] = {}
    for name, value in model.named_parameters():
        if value.requires_grad:
            share = ratio if re.search("lora_(embedding_)?B", name) else 1.0
            groups.setdefault(config.algorithm.lr * share, []).append(value)
    return [{"params": values, "lr": lr} for lr, values in groups.items()]


def schedule(settings: Optim, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate at a step, counted from 0: a linear warm-up, then the chosen decay."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / (total_steps - warmup)
    descents = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return descents[settings.schedule]
