"""What guards the imports of a command. It imports next to nothing itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_missing_packages() -> Iterator[None]:
    """Exit with one line if an import finds no package, because this is the Python of the system, and at Ctrl-C."""
    if sys.flags.optimize > 1:
        print("octet: PYTHONOPTIMIZE=2 removes texts that transformers needs. Start without it.", file=sys.stderr)
        sys.exit(2)
    try:
        yield
    except ModuleNotFoundError as error:
        remedy = "Start with ./run_deepspeed.sh, which makes .venv with all of them, or use .venv/bin/python."
        print(f"octet: {sys.executable} has no package {error.name}. {remedy}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("octet: stopped.", file=sys.stderr)
        sys.exit(130)
