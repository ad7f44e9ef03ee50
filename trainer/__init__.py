"""Octet: GRPO training of language models on one 8 GB gaming card, and the same run on a cluster.

The folders are the steps of the algorithm; read them in the order in which a training step uses them:

    problem/       the questions, and the prompts that a model sees
    rollout/       groups of answers to each prompt, from a sampler
    reward/        the reward of each answer
    advantage.py   how much better an answer is than the rest of its group
    batch/         rows of tokens, packed into micro-batches
    loss/          log-probs and objectives
    step/          one update of the adapter or model, by the DeepSpeed engine

`loop.py` runs these seven steps, and `records.py` has the records that travel between them.

From Python: `from octet import resolve, train`; docs/python.md has examples. The public names are imported when they
are first used, so that no command waits for them; __init__.pyi has their types.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PLACES = {
    "Config": "trainer.config.settings",
    "OctetError": "trainer.errors",
    "OpenEnv": "trainer.problem.adapters",
    "Verifiers": "trainer.problem.adapters",
    "resolve": "trainer.config.command_line",
    "train": "trainer.run.python",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return [*_PLACES, "__version__"]
