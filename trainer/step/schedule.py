"""step: the learning rate over a run."""

from __future__ import annotations

import math

from trainer.config.settings import Optim


def schedule(settings: Optim, step: int, total_steps: int) -> float:
    """Return the share of the peak learning rate at a step, counted from 0: a linear warm-up, then the chosen decay."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup)
    descents = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return descents[settings.schedule]
