"""Keeps a server alive as long as the trainer lives, and no longer: `python keeper.py PID COMMAND ...`

The trainer may be killed without a chance to clean up, so it is not the one that cleans up. This process is told who
its parent is; when that is gone, or asks for the end, it ends the whole session of the server. No imports of Octet: it
runs in a fresh interpreter that should start at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import FrameType

AGAIN_S = 2.0  # vLLM waits for open connections at the first signal, and for nothing at the second
GRACE_S = 20.0  # for the server to leave by itself
LOOKS_EVERY_S = 0.3


def main() -> int:
    trainer, command = int(sys.argv[1]), sys.argv[2:]
    asked = []

    def end(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm's word to the run that its time is up; the server inherits it
    server = subprocess.Popen(command, start_new_session=True)
    while server.poll() is None and not asked and os.getppid() == trainer:
        time.sleep(LOOKS_EVERY_S)
    _end(server)
    return server.returncode or 0


def _end(server: subprocess.Popen[bytes]) -> None:
    """The server and all that it started, which is what its session is."""
    for patience_s in (AGAIN_S, GRACE_S):
        if server.poll() is None:
            _signal(server, signal.SIGINT)
            _wait(server, patience_s)
    _signal(server, signal.SIGKILL)
    server.wait()


def _wait(server: subprocess.Popen[bytes], patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while server.poll() is None and time.monotonic() < deadline:
        time.sleep(LOOKS_EVERY_S)


def _signal(server: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all gone
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
