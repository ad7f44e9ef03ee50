"""Three steps of the real loop, engine and evaluation, with answers that follow from the problem and not from the rank.

    RANK=0 WORLD_SIZE=2 ... python -m tests.e2e.loops FOLDER zero1 "zero3 whole" "zero2 sampled"

A case is an engine, and what is trained if that is no adapter. In "sampled" the policy itself answers. Elsewhere every
second problem of a step, which are those of rank 1 of two, has answers twice as long; in the second step all answers to
these are wrong, so that rank 1 has nothing to train on. The output layer takes a few tokens at a time, so that ranks
need it a different number of times.
"""

import sys
from pathlib import Path
from typing import Any

import torch.distributed

from tests.conftest import learned, lines_of
from tests.e2e.updates import leave
from tests.plan.conftest import without_threshold
from tests.samplers import Scripted
from trainer import loop
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.loss import logprobs
from trainer.machine import quiet
from trainer.model import lora
from trainer.ranks import distributed
from trainer.records import Prompt
from trainer.rollout.make import make_sampler
from trainer.rollout.turns import Stops
from trainer.run import assemble

STEPS, PROBLEMS, DEAD_STEP = 3, 4, 1
SETTINGS = [f"run.steps={STEPS}", f"rollout.problems={PROBLEMS}", "rollout.group_size=4", "eval.problems=7"]
SETTINGS += ["algorithm.lr=1e-4", "optim.warmup=0", "optim.tokens_per_micro_batch=256", "lora.r=4", "task.limit=256"]
SETTINGS += ["rollout.vllm.max_difference=100"]  # the log-probs that come with the answers are made up
TOKENS_AT_ONCE = 32
SETTINGS_OF = {"": [], "whole": ["lora.enabled=false"], "sampled": []}
SETTINGS_OF["penalised"] = ["lora.enabled=false", "algorithm.kl.coef=0.1", "algorithm.kl.where=reward"]


class Told(Scripted):
    """A sampler that has the answers by heart."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, self.by_heart)
        self.places: dict[str, tuple[int, int]] = {}  # problem -> its step, and its place there

    def by_heart(self, prompt: Prompt, number: int) -> str:
        step, place = self.places.get(prompt.problem.id, (0, 0))
        is_right = (number + place) % 3 == 0 and not (step == DEAD_STEP and place % 2)
        words = " 7 + 2" * (1 + number + step) * (1 + place % 2)
        return f"{words} #### {prompt.problem.gold if is_right else 'none'}"


def run(folder: Path, case: str) -> dict[str, Any]:
    told: list[Told] = []
    engine, _, kind = case.partition(" ")

    def by_heart(rollout: Any, model: Any, stops: Stops, *_: Any, **__: Any) -> Told:
        told.append(Told(stops.tokenizer))
        return told[-1]

    assemble.make_sampler = make_sampler if kind == "sampled" else by_heart
    split = without_threshold(engine, folder / f"{engine}-{distributed.world_size()}-{distributed.rank()}.json")
    own = [f"engine.ds_config={split}", f"run.dir={folder / case}-{distributed.world_size()}"]
    made = assemble.build(Request(resolve("nano", None, [*SETTINGS, *SETTINGS_OF[kind], *own]), "nano", ""))
    logprobs.CHUNK_BYTES = 4 * made.updater.policy.model.config.vocab_size * TOKENS_AT_ONCE
    drawn = [enumerate(made.rollouts.curriculum.draw(step)) for step in range(STEPS)]
    for sampler in told:
        sampler.places = {problem.id: (step, place) for step, of_step in enumerate(drawn) for place, problem in of_step}
    policy = made.updater.policy
    loop.train(made.log.config, *made)
    with policy.gathered():
        trained = {name: value.flatten().tolist() for name, value in lora.trainable(policy.model).items()}
    lines = lines_of(made.log.folder / "metrics.jsonl") if distributed.is_main() else []
    fullest = [line.get("memory/fullest_rank") for line in lines]
    return {"learned": trained, "metrics": learned(made.log.folder) if lines else [], "fullest": fullest}


def main(folder: str, *cases: str) -> None:
    quiet.quiet()
    torch.distributed.distributed_c10d._object_to_tensor = None  # a rank that sends another one a pickle ends
    distributed.connect(timeout_s=580)
    results = {case: run(Path(folder), case) for case in cases}
    leave(Path(folder, f"{distributed.world_size()}.json"), results)


if __name__ == "__main__":
    main(*sys.argv[1:])
