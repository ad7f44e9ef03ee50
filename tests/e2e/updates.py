"""Runs updates of a tiny model through the real engine and writes down what came of them.

    RANK=0 WORLD_SIZE=2 ... python -m tests.e2e.updates MODEL_FOLDER OUT.json CASE...

A case is `name:ds_config:token budget:rows of rank 0,rows of rank 1:settings`, such as `uneven:zero2:30:6,2` or
`full:zero2:30:8:lora.enabled=false`. All cases train on the same eight rows, however they are dealt out.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

import train
from tests.conftest import row
from trainer import distributed, quiet
from trainer.batches import pack
from trainer.config import Config
from trainer.losses import LOSSES, PolicyTerms, total
from trainer.settings import resolve
from trainer.types import TrainingRow

# Different lengths, so that the token counts of two ranks differ as well as their rows.
ROWS = [row(3 + i % 3, 2 + 3 * (i % 4), advantage=[1.0, -1.0, 0.5, -0.25][i % 4], first=20 + 5 * i) for i in range(8)]
IDLE = row(3, 1, advantage=0.0)
UPDATES = 3


def settings(model: str, ds_config: str, *more: str) -> Config:
    overrides = [f"model.name={model}", f"engine.ds_config={ds_config}", "rollout.temperature=0.7", "algorithm.lr=0.01"]
    overrides += ["optim.warmup=0", "optim.schedule=constant", "lora.r=4", "lora.alpha=8", "optim.max_grad_norm=0.5"]
    return resolve("nano", None, [*overrides, *more])


def add_gradient(policy, batches, tokens, losses):
    for batch in batches:
        scores = policy.score(batch)
        terms = PolicyTerms(scores.logprobs_BT, scores.logprobs_BT.detach(), batch.advantages_B)
        loss = total(LOSSES["grpo_clip"](terms, policy.config.algorithm), batch.mask_BT, tokens)
        losses.append(float(loss.detach()))
        policy.backward(loss)


def make_model(config: Config, dtype: str = "fp32") -> Any:
    from trainer.policy.base import load_model
    from trainer.policy.lora import add_adapter

    torch.manual_seed(0)
    model = load_model(config.model, dtype, torch.device("cpu"))
    return add_adapter(model, config.lora) if config.lora.enabled else model


def run(config: Config, mine: list[TrainingRow], budget: int) -> dict:
    from trainer.policy.engine import DeepSpeedPolicy
    from trainer.policy.lora import trainable

    model = make_model(config)
    if config.lora.init == "zero":  # PiSSA needs weights of full rank
        deterministic(model)
    policy = DeepSpeedPolicy(model, config, "fp32", total_steps=UPDATES)
    tokens = sum(len(one.completion) for one in ROWS)
    batches, losses, updates, rates = pack(mine or [IDLE], budget, pad_token=0), [], [], []
    for step in range(UPDATES):
        updates.append(policy.update(partial(add_gradient, policy, batches, tokens, losses), step))
        rates.append(policy.engine.get_lr())
    first = sum(losses[: len(batches)])
    return {
        "loss": distributed.total(first),
        "grad_norms": [update.grad_norm for update in updates],
        "lr": [update.lr for update in updates],
        "rates": rates,  # of each group
        "trained": {name: value.flatten().tolist() for name, value in trainable(policy.model).items()},
    }


def deterministic(model: torch.nn.Module) -> None:
    """The same weights whatever the generator of this torch: a wave, differently fast in each tensor."""
    with torch.no_grad():
        for number, (name, value) in enumerate(sorted(model.named_parameters())):
            wave = torch.sin(torch.arange(value.numel(), dtype=torch.float64) * (1.0 + 0.37 * number)).reshape(
                value.shape
            )
            value.copy_(wave * (0.0 if "lora_B" in name else 0.1) + (1.0 if "norm" in name else 0.0))


def main(model: str, out: str, *cases: str) -> None:
    quiet.quiet()
    distributed.connect(timeout_s=60)
    results = {}
    for case in cases:
        name, ds_config, budget, shares, *more = case.split(":")
        counts = [int(count) for count in shares.split(",")]
        start = sum(counts[: distributed.rank()])
        mine = ROWS[start : start + counts[distributed.rank()]]
        config = settings(model, ds_config, *" ".join(more).split())
        results[name] = run(config, mine, int(budget))
    if distributed.is_main():
        Path(out).write_text(json.dumps(results))
    distributed.barrier()
    distributed.disconnect()
    train.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
