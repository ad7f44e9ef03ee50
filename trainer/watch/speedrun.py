"""The results of `octet speedrun`: what a racer may change, and a line of the table."""

from collections.abc import Mapping
from typing import Any

GOAL = 0.9
# The model, the problems and the evaluation are those of everybody.
FREE = r"(algorithm|optim|rollout|lora)\.(?!vllm|start|engine)\w+|run\.(seed|steps|threads)|eval\.every"
COLUMNS = "| CPU seconds | wall seconds | answers | processor | threads | settings | date |"


def row_of(result: Mapping[str, Any]) -> str:
    """Return a result as a line of the table in gallery/speedrun.md."""
    made, settings = result["made_with"], " ".join(result["settings"]) or "as they are"
    numbers = [f"{result['cpu_seconds']:.1f}", f"{result['wall_seconds']:.1f}", result["answers"]]
    where = [result["processor"], f"{made['threads']} of {result['cores']}", settings, result["date"]]
    return f"| {' | '.join(str(cell).replace('|', ' ') for cell in (*numbers, *where))} |"
