"""Trains the embedded model for two steps with each recipe, through the real engine, in one process.

    python -m tests.e2e.recipes FOLDER RECIPE...          each has its run folder FOLDER/RECIPE

FOLDER/moved.json says how far the adapter went from where it started.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer.config.command_line import Request, resolve
from trainer.config.settings import Config
from trainer.loop import train
from trainer.machine import quiet
from trainer.run import assemble

# What a write-up says about the model, the task and the size of things makes room for what two cores can do.
SMALL = ["model.name=nano", "task.name=nano", "prompt.style=auto", "eval.problems=0", "run.steps=2", "run.threads=1"]
SMALL += ["rollout.problems=8", "rollout.group_size=4", "rollout.max_new_tokens=40"]


def small(recipe: str, *more: str) -> Config:
    teacher = ["teacher.name=nano", "teacher.quantize=none"] if recipe == "distill" else []
    return resolve("nano", recipe, [*SMALL, *teacher, *more])


def run(recipe: str, folder: Path) -> float:
    config = small(recipe, f"run.dir={folder / recipe}")
    made = assemble.build(Request(config, recipe, ""))
    trainable = made.updater.policy.trainable
    before = [parameter.detach().clone() for parameter in trainable]
    train(config, *made)
    made.record.close()
    pairs = zip(before, trainable, strict=True)
    return sum(float((after.detach() - start).norm()) for start, after in pairs)


def main(folder: str, *recipes: str) -> None:
    quiet.quiet()
    with assemble.process_group(small(recipes[0])):
        moved = {recipe: run(recipe, Path(folder)) for recipe in recipes}
    (Path(folder) / "moved.json").write_text(json.dumps(moved))


if __name__ == "__main__":
    main(*sys.argv[1:])
