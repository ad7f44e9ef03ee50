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
    source: Literal["solutions", "samples"] = Field("solutions", alias="from")
    """What is taught: `solutions` of the task, or `samples`, the model's own right answers (STaR, rejection
    sampling)."""
    rounds: int = Field(1, ge=1)
    """With `from=samples`: how often answers are sampled anew. The steps are divided among the rounds."""
    asked: int = Field(256, ge=1)
    """With `from=samples`: problems that are asked in a round, `rollout.group_size` answers each."""
    keep: int = Field(4, ge=1)
    """With `from=samples`: most answers to a problem that are kept, the shortest of the right ones that differ."""
    problems: int = Field(32, ge=1)
    """Solutions in a step, over all ranks."""
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
