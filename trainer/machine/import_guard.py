"""Guard the imports of a command. This module imports almost nothing itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_missing_packages() -> Iterator[None]:
    """Exit with one line at Ctrl-C, and if a package is missing, because this is the system's Python."""
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = "Start with ./run_deepspeed.sh, which installs all packages into .venv, or use .venv/bin/python."
        print(f"octet: {sys.executable} has no package {error.name}. {remedy}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("octet: stopped.", file=sys.stderr)
        sys.exit(130)
