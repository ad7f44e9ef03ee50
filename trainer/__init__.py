"""Octet: GRPO training of language models on one 8 GB gaming card, and the same run on a cluster.

A training step is problem/ -> rollout/ -> reward/ -> advantage.py -> batch/ -> loss/ -> step/, which `loop.py` runs.
`records.py` has the records that travel between them, and docs/architecture.md says what is where.

From Python: `from octet import resolve, train`; docs/python.md has examples. The public names are imported when they
are first used, so that no command waits for them; __init__.pyi has their types.
"""

import os
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# A thread of torch that waits for another one keeps its core, by default for milliseconds. Beside another busy program
# the other one may be waiting for this very core, and a rollout took a hundred times as long. libgomp reads this once.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_PLACES = {
    "Config": "trainer.config.settings",
    "Interrupted": "trainer.errors",
    "OctetError": "trainer.errors",
    "OpenEnv": "trainer.problem.foreign_environments",
    "Verifiers": "trainer.problem.foreign_environments",
    "evaluate": "trainer.commands.eval",
    "export": "trainer.commands.export",
    "resolve": "trainer.config.resolve",
    "train": "trainer.run.python_api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Return the public names, for completion."""
    return [*_PLACES, "__version__"]
