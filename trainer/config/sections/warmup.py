"""The section `warmup`: what a model is taught before GRPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from trainer.config.sections.base import Section


class Warmup(Section):
    """docs/warmup.md says when a warm-up helps."""

    steps: int = Field(0, ge=0)
    """Steps of supervised training on worked solutions before GRPO; 0 for none. They are a run of their own in the
    folder `warmup` of the run folder."""
    only: bool = False
    """End after the warm-up, whose run folder then is `run.dir`. `octet warmup` sets this."""
    problems: int = Field(32, ge=1)
    """Worked solutions in a step, over all ranks."""
    lr: float = Field(2e-4, gt=0.0)
    """Peak learning rate of the warm-up. The schedule is that of `optim`."""
    then: Literal["same", "merged"] = "same"
    """How GRPO goes on with an adapter: `same` trains the adapter of the warm-up further, `merged` merges it into the
    base and trains a fresh adapter over that. A whole model (`lora.enabled=false`) is always trained further."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations in the warm-up; by default there is one before the first step and one after the
    last."""
    metric: Literal["loss", "accuracy", "lenient"] = "loss"
    """What decides on the best evaluation, with which GRPO goes on: the loss of held-out solutions, or an accuracy."""
    patience: int | None = Field(None, ge=1)
    """End the warm-up after this many evaluations in a row without a new best; by default never."""
