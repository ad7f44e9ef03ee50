"""The location of the files that are installed with Octet's modules (job scripts, DeepSpeed settings, train.py, pinned
versions), and the commands that a person types to use them."""

import os
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
IS_INSTALLED = not (CHECKOUT / "run_deepspeed.sh").is_file()
ROOT = CHECKOUT / "trainer" / "shipped" if IS_INSTALLED else CHECKOUT


def train_here() -> str:
    """Return the command that starts a run from this folder, which may not be the clone."""
    return "./run_deepspeed.sh" if os.path.isfile("run_deepspeed.sh") else f"{octet_here()} train"


def octet_here() -> str:
    """Return the command `octet` for this folder: the environment of a clone may not be active."""
    own = CHECKOUT / ".venv"
    return shlex.quote(os.path.relpath(own / "bin/octet")) if Path(sys.prefix).resolve() == own.resolve() else "octet"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra into this environment."""
    if IS_INSTALLED:
        return f"pip install 'octet-grpo[{extra}]'"
    return f"{os.path.relpath(Path(sys.prefix) / 'bin/pip')} install -e '{os.path.relpath(CHECKOUT)}[{extra}]'"
