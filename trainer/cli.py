"""The command `octet`, and how every command ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from trainer.errors import OctetError


def answering_errors(command: Callable[[], None], debug: bool = False) -> int:
    """Run a command. What went wrong is one clear message and status 2; the traceback is for `--debug`."""
    try:
        command()
    except OctetError as error:
        if debug:
            raise
        print(f"octet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("octet: stopped. The same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    return 0
