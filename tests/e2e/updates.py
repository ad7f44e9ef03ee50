"""Runs updates of a tiny model through the real engine and writes down what came of them.

    RANK=0 WORLD_SIZE=2 ... python -m tests.e2e.updates MODEL_FOLDER OUT.json '[{"name": "uneven", "groups": [3, 1]}]'

A case says how many of the four groups each rank gets. All cases train on the same eight rows, however they are dealt.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import train
from tests.conftest import row
from trainer.batch.pack import AGGREGATIONS, Packer, minibatches
from trainer.config.resolve import resolve
from trainer.config.settings import Config
from trainer.loss.objectives import Coefficient
from trainer.machine import quiet
from trainer.model.embedding_and_head import causal_lm_of
from trainer.model.load import load_model
from trainer.model.lora import add_adapter, add_teacher
from trainer.ranks import distributed
from trainer.records import MiniBatch, TrainingRow
from trainer.step.engine import DeepSpeedPolicy
from trainer.step.update import Updater
from trainer.watch.tally import Tally

# Different lengths, so that the token counts of two ranks differ as well as their rows. Two rows are a group.
ROWS = [row(3 + i % 3, 2 + 3 * (i % 4), advantage=[1.0, -1.0, 0.5, -0.25][i % 4], first=20 + 5 * i) for i in range(8)]
IDLE = row(3, 1, advantage=0.0, weight=0.0)
UPDATES = 3


@dataclass(frozen=True)
class Case:
    name: str
    groups: Sequence[int]  # of each rank
    budget: int = 10_000
    ds_config: str = "zero2_offload"
    backwards: bool = False  # the groups in the opposite order
    settings: Sequence[str] = ()
    memory: Sequence[int | None] = (None, None)  # of each rank: tokens of one training pass that there is memory for
    breaks: str = "forward"  # where a pass with more breaks off
    as_it_is: bool = False  # the base as it is in its folder; only the adapter is given its values


def settings(model: str, case: Case) -> Config:
    overrides = [f"model.name={model}", f"engine.ds_config={case.ds_config}", "rollout.temperature=0.7"]
    overrides += ["optim.warmup=0", "optim.schedule=constant", "lora.r=4", "lora.alpha=8", "optim.max_grad_norm=0.5"]
    overrides += [f"optim.tokens_per_micro_batch={case.budget}", "algorithm.lr=0.01"]
    return resolve("nano", None, [*overrides, "algorithm.correction.level=none", *case.settings])


def in_pairs(rows: Sequence[TrainingRow], aggregation: str) -> list[TrainingRow]:
    """Rows of groups of two, with the weights that the aggregation gives them."""
    made = []
    for place, pair in enumerate(zip(rows[::2], rows[1::2], strict=True)):
        weights = AGGREGATIONS[aggregation]([len(one.completion) for one in pair])
        made += [replace(one, weight=weight, place=place) for one, weight in zip(pair, weights, strict=True)]
    return made


def in_one(policy: Any, aggregation: str = "dapo") -> MiniBatch:
    """All rows as one mini-batch, for one update of a policy."""
    packer = Packer(10_000, 0, policy.is_flat)
    (minibatch,) = minibatches(in_pairs(ROWS, aggregation), IDLE, policy.config, packer)
    return minibatch


def make_model(config: Config, dtype: str = "fp32") -> Any:
    torch.manual_seed(0)
    model = load_model(config.model, dtype, torch.device("cpu"))
    model = add_adapter(model, config.lora) if config.lora.enabled else model
    if config.teacher.adapter:
        add_teacher(model, config.teacher.adapter)
    return model


def limit(model: torch.nn.Module, tokens: int, breaks: str) -> None:
    """A card on which a training pass over more tokens than these runs out of memory in the middle of the layers."""

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def check(_: Any, __: Any, hidden_BTH: torch.Tensor) -> None:
        if hidden_BTH.shape[:2].numel() <= tokens:
            return
        if breaks == "forward":
            out_of_memory()
        elif hidden_BTH.requires_grad:
            hidden_BTH.register_hook(out_of_memory)

    causal_lm_of(model).get_decoder().layers[0].register_forward_hook(check)


def updater_of(policy: Any, config: Config, say: Callable[[str], None] = print) -> Updater:
    packer = Packer(config.optim.tokens_per_micro_batch, 0, policy.is_flat)
    return Updater(policy, config, torch.device("cpu"), packer, Coefficient(config.algorithm.kl), say)


def run(config: Config, case: Case, mine: list[TrainingRow]) -> dict:
    model = make_model(config)
    if config.lora.init == "zero":  # PiSSA needs weights of full rank
        deterministic(model, only_trained=case.as_it_is)
    if memory := case.memory[distributed.rank()]:
        limit(model, memory, case.breaks)
    policy = DeepSpeedPolicy(model, config, "fp32", total_steps=UPDATES)
    told: list[str] = []
    updater = updater_of(policy, config, told.append)
    steps, measured, rates = [], [], []
    for step in range(UPDATES):
        policy.refresh_reference(step)
        tally = Tally()
        steps += updater.update(updater.prepare(minibatches(mine, IDLE, config, updater.packer)), step, tally)
        rates.append(policy.engine.get_lr())
        measured.append(tally.means(distributed.gather))
    with policy.gathered():
        adapter = {name: value.flatten().tolist() for name, value in model.named_parameters() if value.requires_grad}
    of_steps = {"grad_norms": [one.grad_norm for one in steps], "lr": [one.lr for one in steps]}
    of_steps |= {"updates": [dict(one.measured) for one in steps], "rates": rates, "measured": measured}
    return {"loss": measured[0]["loss"], "adapter": adapter, "told": told, **of_steps}  # rates of each group


def deterministic(model: torch.nn.Module, only_trained: bool = False) -> None:
    """The same weights whatever the generator of this torch: a wave, differently fast in each tensor."""
    with torch.no_grad():
        for number, (name, value) in enumerate(sorted(model.named_parameters())):
            if only_trained and not value.requires_grad:
                continue
            places = torch.arange(value.numel(), dtype=torch.float64)
            wave = torch.sin(places * (1.0 + 0.37 * number)).reshape(value.shape)
            value.copy_(wave * (0.0 if "lora_B" in name else 0.1) + (1.0 if "norm" in name else 0.0))


def main(model: str, out: str, cases: str) -> None:
    quiet.quiet()
    distributed.connect(timeout_s=580)
    results = {}
    for case in (Case(**case) for case in json.loads(cases)):
        config = settings(model, case)
        rows = in_pairs(ROWS, config.algorithm.aggregation)
        groups = [*zip(rows[::2], rows[1::2])][:: -1 if case.backwards else 1]
        start = sum(case.groups[: distributed.rank()])
        mine = [row for pair in groups[start : start + case.groups[distributed.rank()]] for row in pair]
        results[case.name] = run(config, case, mine)
    leave(Path(out), results)


def leave(file: Path, results: dict[str, Any]) -> None:
    """Let rank 0 write the results, and end all ranks."""
    if distributed.is_main():
        file.write_text(json.dumps(results))
    distributed.barrier()
    distributed.disconnect()
    train.leave(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
