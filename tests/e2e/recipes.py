"""What two steps of each recipe with the embedded model need: less of everything that a write-up says about size."""

from trainer.config.command_line import resolve
from trainer.config.settings import Config

SMALL = ["model.name=nano", "task.name=nano", "prompt.style=auto", "eval.problems=8", "run.steps=2", "run.threads=1"]
SMALL += ["rollout.problems=8", "rollout.group_size=4", "rollout.max_new_tokens=40", "run.merge=false"]
OF_ONE = {"distill": ["teacher.name=nano", "teacher.quantize=none"]}
OF_ONE |= {name: ["warmup.steps=3", "warmup.asked=16", "warmup.problems=4"] for name in ("star", "warm_grpo")}


def small(recipe: str) -> list[str]:
    """Return the settings that go over a recipe."""
    return [*SMALL, *OF_ONE.get(recipe, [])]


def resolved(recipe: str) -> Config:
    return resolve("nano", recipe, small(recipe))
