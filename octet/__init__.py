"""The public names of Octet: `from octet import resolve, train`. docs/python.md has examples.

The program is the package `trainer`. Other distributions have a package of that name, too, so all who come in here, and
the command `octet`, are told which one Python would import before anything of it runs.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def must_be_ours() -> None:
    """Raise ImportError if `import trainer` would find nothing, or something else than Octet's package."""
    spec = find_spec("trainer")
    if spec is None or spec.origin is None:  # or what pip uninstall of the other one has left
        raise ImportError(f"{sys.executable} has no package trainer, which is Octet's program. Write {_REINSTALL}.")
    if Path(spec.origin).read_text(errors="replace").startswith('"""Octet:'):
        return
    from importlib.metadata import packages_distributions  # its import takes as long as Python's start

    others = sorted(set(packages_distributions().get("trainer", [])) - {"octet-grpo"})
    remedy = f"Write pip uninstall {' '.join(others)}, then {_REINSTALL}" if others else "Rename it, or work elsewhere"
    raise ImportError(f"{spec.origin} is called trainer, as Octet's program is, and Python finds it first. {remedy}.")


_REINSTALL = "pip install --force-reinstall --no-deps octet-grpo; or give Octet an environment of its own"


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__version__":
        raise AttributeError(f"module 'octet' has no attribute {name!r}")
    must_be_ours()
    package = import_module("trainer")
    return package.__version__ if name == "__version__" else package.__getattr__(name)  # it has a folder export/


def __dir__() -> list[str]:
    """Return the names that completion offers."""
    must_be_ours()
    return dir(import_module("trainer"))
