"""The location of the files that are installed with Octet's modules (job scripts, DeepSpeed settings, train.py, pinned
versions), and the commands that a person types to use them."""

import configparser
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
IS_INSTALLED = not (CHECKOUT / "run_deepspeed.sh").is_file()
ROOT = CHECKOUT / "trainer" / "shipped" if IS_INSTALLED else CHECKOUT
CONSTRAINTS = ROOT / "constraints.txt"  # the versions that were tested together


def train_here() -> str:
    """Return the command that starts a run from this folder, which may not be the clone."""
    return "./run_deepspeed.sh" if os.path.isfile("run_deepspeed.sh") else f"{octet_here()} train"


def octet_here() -> str:
    """Return the command `octet` for this folder: the environment of a clone may not be active."""
    own = CHECKOUT / ".venv"
    return shlex.quote(os.path.relpath(own / "bin/octet")) if Path(sys.prefix).resolve() == own.resolve() else "octet"


def in_a_process(words: Sequence[str] = (), start: str = "from octet.__main__ import main; main()") -> list[str]:
    """Return the command that runs octet, or other code, in a process that finds the modules that this one finds. With
    `python -m`, those of the working folder would come first."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {start}", *words]


def packages_needed(extra: str = "") -> list[str]:
    """Return the packages that Octet, or an extra, needs, as setup.cfg names them."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return (setup["options.extras_require"][extra] if extra else setup["options"]["install_requires"]).split()


def pip_install(extra: str) -> str:
    """Return the command that installs an extra into this environment."""
    if IS_INSTALLED:
        return f"pip install 'octet-grpo[{extra}]'"
    pip, here = os.path.relpath(Path(sys.prefix) / "bin/pip"), os.path.relpath(CHECKOUT)
    return shlex.join([pip, "install", "-e", f"{here}[{extra}]"])
