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
    """End after the warm-up, in `run.dir` itself. `octet warmup` sets this."""
    source: Literal["solutions", "samples"] = Field("solutions", alias="from")
    """What is taught: `solutions` of the task, or `samples`, the model's own right answers (STaR, rejection
    sampling)."""
    rounds: int = Field(1, ge=1)
    """With `from=samples`: rounds of sampling, among which the steps are divided."""
    asked: int = Field(256, ge=1)
    """With `from=samples`: problems per round, each with `rollout.group_size` answers."""
    keep: int = Field(4, ge=1)
    """With `from=samples`: most right answers to keep per problem, the shortest different ones."""
    problems: int = Field(32, ge=1)
    """Solutions in a step, over all ranks."""
    lr: float = Field(2e-4, gt=0.0)
    """Peak learning rate of the warm-up, with the schedule of `optim`."""
    then: Literal["same", "merged"] = "same"
    """How GRPO continues: `same` trains the adapter of the warm-up further, `merged` merges it into the base and trains
    a fresh adapter. A whole model (`lora.enabled=false`) is always trained further."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations in the warm-up; by default there is one before the first step and one after the
    last."""
    metric: Literal["loss", "accuracy", "lenient"] = "loss"
    """What selects the best evaluation, from which GRPO continues: the loss of held-out solutions, or an accuracy."""
    patience: int | None = Field(None, ge=1)
    """End the warm-up after this many evaluations in a row without a new best; by default never."""

    @property
    def goes_on(self) -> bool:
        """Return True if GRPO trains what the warm-up has trained."""
        return self.steps > 0 and not self.only and self.then == "same"
