"""step: one update of the trainable parameters by a DeepSpeed ZeRO engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
from torch import Tensor

from trainer import distributed
from trainer.config import Config, Optim
from trainer.errors import CheckpointError
from trainer.logprobs import LogProbs, Scores
from trainer.policy import ds_config, lora
from trainer.policy.optimizer import make_optimizer
from trainer.policy.trained import make_trained
from trainer.types import TrainingBatch


class Update(NamedTuple):
    grad_norm: float  # before clipping
    lr: float  # read back from the optimizer
    skipped: bool  # the gradient was not finite, so nothing moved


PATIENCE = {"fp16": 24}  # fp16 starts with a loss scale of 2 ** 16 and halves it until gradients are finite


class DeepSpeedPolicy:
    """The model inside the engine. One `update` is one reduction over the ranks and one step."""

    def __init__(self, model: Any, config: Config, dtype: str, total_steps: int) -> None:
        self.model = model
        self.total_steps = total_steps
        self.bad_updates_allowed = PATIENCE.get(dtype, 3)
        self.config = config
        optimizer = make_optimizer(model, config)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        settings = ds_config.fill(ds_config.read(config.engine.ds_config), dtype, config.optim.max_grad_norm)
        if not distributed.on_gpu():
            _use_gloo_as_it_is()
        self.engine, *_ = deepspeed.initialize(
            model=LogProbs(model, config.rollout.temperature),
            optimizer=optimizer,
            config=settings,
            dist_init_required=False,
        )
        self.trained = make_trained(model, config, dtype)  # with the values as the engine has rounded them

    def score(self, batch: TrainingBatch) -> Scores:
        scores: Scores = self.engine(batch)
        return scores

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a share of the step's loss. The engine averages over ranks, the loss wants the sum."""
        self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)

    def update(self, gradient: Callable[[], None], step: int) -> Update:
        """One step on what `gradient` adds up by calling `backward`, reduced once, however often it does."""
        share = schedule(self.config.optim, step, self.total_steps)
        for group, peak in zip(self.engine.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        self.engine.train()
        with self.engine.coalesce_grad_reduction():
            gradient()
        self.engine.step()
        return Update(
            float(self.engine.get_global_grad_norm()), self.engine.get_lr()[0], self.engine.optimizer.overflow
        )

    def fingerprint(self) -> float:
        return lora.fingerprint(self.model)

    def as_base(self) -> AbstractContextManager[None]:
        """The model as it was before the first update."""
        return self.trained.as_base(self.engine.global_steps)

    def export(self, folder: Path) -> None:
        """What was trained, for other programs. Rank 0 calls it."""
        self.trained.export(folder)

    def save(self, folder: Path) -> None:
        """Optimizer state and trainable parameters; every rank calls it. A frozen base is not written."""
        state, settings = {"start": self.trained.start()}, {"tag": "engine", "save_latest": False}
        self.engine.save_checkpoint(str(folder), client_state=state, exclude_frozen_parameters=True, **settings)
        if self.config.lora.enabled and distributed.is_main():
            self.export(folder / self.config.lora.product)

    def load(self, folder: Path) -> None:
        path, state = self.engine.load_checkpoint(str(folder), tag="engine", load_module_strict=False)
        if path is None:
            raise CheckpointError(f"{folder}: it holds no engine state. Delete it to go on from the one before.")
        self.trained.restart(state["start"])


def schedule(settings: Optim, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at a step (counted from 0): a rising line, then the chosen descent."""
    warmup = round(settings.warmup * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, total_steps - warmup)
    descents = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return descents[settings.schedule]


def _use_gloo_as_it_is() -> None:
    """On a CPU DeepSpeed compiles a shared-memory all-reduce for a minute: an empty table of ops says it cannot."""
    deepspeed.ops.__compatible_ops__ = {}
