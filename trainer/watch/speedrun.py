"""The results of `octet speedrun`: the settings that an entry may change, and its row in the table."""

from collections.abc import Mapping
from typing import Any

GOAL = 0.9
# Settings that an entry may change. All entries share the model, the problems and the evaluation.
FREE = r"(algorithm|optim|rollout|lora)\.(?!vllm|start|engine)\w+|run\.(seed|steps|threads)|eval\.every"
COLUMNS = "| CPU seconds | wall seconds | answers | processor | threads | settings | date |"


def row_of(result: Mapping[str, Any]) -> str:
    """Return a result as a row of the table in gallery/speedrun.md."""
    settings = " ".join(result["settings"]) or "as they are"
    threads = f"{result['made_with']['threads']} of {result['cores']}"
    cells = [f"{result['cpu_seconds']:.1f}", f"{result['wall_seconds']:.1f}", result["answers"]]
    cells += [result["processor"], threads, settings, result["date"]]
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in cells)} |"
