"""How every command ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from trainer.errors import Interrupted, OctetError
from trainer.machine import disk


def answering_errors(command: Callable[[], None], debug: bool = False) -> int:
    """Run a command. What went wrong is one clear message and a status of its own; the traceback is for `--debug`."""
    try:
        command()
    except OctetError as error:
        if debug and not isinstance(error, Interrupted):
            raise
        _complain(error)
        return error.status
    except OSError as error:
        if debug or error.errno not in disk.FULL:
            raise
        print(
            f"octet: {error.filename or 'while writing'}: the disk is full. Make room and repeat it.", file=sys.stderr
        )
        return 2
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("octet: stopped. A run goes on from its last checkpoint with --resume.", file=sys.stderr)
        return 130
    return 0


def leave(status: int) -> None:
    """With several ranks, at once: gloo's threads can abort an orderly exit (status 134) when all work is done."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _complain(error: OctetError) -> None:
    """From every rank, because what is wrong may be wrong on one node only, unless it is known to be wrong on all."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        print(f"octet: {error}", file=sys.stderr)
    elif not error.is_of_all and not isinstance(error, Interrupted):  # all of them stop together
        print(f"octet: rank {rank}: {error}", file=sys.stderr)
