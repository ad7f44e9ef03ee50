"""The sections `warmup` and `teacher`: supervised training before GRPO, and a model that grades each token."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trainer.config.sections.base import BaseAddress, Section


class Warmup(Section):
    """docs/warmup.md says when a warm-up helps."""

    steps: int = Field(0, ge=0, le=10**9)
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
    a fresh adapter. A whole model is always trained further."""
    every: int | None = Field(None, ge=1)
    """Steps between evaluations in the warm-up; by default only before the first step and after the last."""
    metric: Literal["loss", "accuracy", "lenient"] = "loss"
    """What selects the best evaluation, from which GRPO continues: the loss of held-out solutions, or an accuracy."""
    patience: int | None = Field(None, ge=1)
    """End the warm-up after this many evaluations in a row without a new best; by default never."""


class Teacher(Section):
    """docs/warmup.md says when a teacher helps."""

    name: str | None = None
    """The teacher: a model on the hub or a local folder, with the tokenizer of `model.name`. With `teacher.url`, the
    name of a model at that server; by default its base."""
    url: BaseAddress | None = None
    """A running vLLM server as teacher, such as `http://127.0.0.1:8000`. `rollout.vllm.wait_s` and
    `rollout.vllm.timeout_s` apply to it, too."""
    revision: str | None = None
    """Branch, tag or commit of the teacher on the hub."""
    quantize: Literal["none", "nf4", "int8", "bf16"] = "none"
    """Store the teacher in fewer bits, as in `model.quantize`."""
    adapter: Path | None = None
    """Folder of an adapter of the teacher. Without `teacher.name`, its base is that of the trained adapter, which is
    loaded once."""
    form: Literal["advantage", "loss"] = "advantage"
    """`advantage`: the advantage of a token is the log-prob of the teacher minus that of the sampler. `loss`: the
    teacher is the reference of the KL in the loss, weighted by `algorithm.kl.coef`."""
    weight: float = Field(1.0, gt=0.0)
    """Weight of the teacher in the advantage of a token."""
    reward: float = Field(0.0, ge=0.0)
    """Weight of the verifier's advantage; 0 learns from the teacher alone."""

    @property
    def is_there(self) -> bool:
        return any(setting is not None for setting in (self.name, self.url, self.adapter))
