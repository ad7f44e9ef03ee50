"""Runs a server and ends it when the trainer ends: `python supervisor.py PID COMMAND ...`

The trainer may be killed without a chance to clean up, so this process does that. PID is the trainer, its parent. When
the parent has ended, or when this process gets a signal, it ends the server with all processes that the server has
started. It imports nothing of Octet, because it runs in a fresh interpreter that should start quickly.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

SECOND_SIGNAL_S = 2.0  # until the second signal, after which vLLM no longer waits for open connections
GRACE_S = 20.0  # time to end before it is killed
POLL_S = 0.3


def main() -> int:
    trainer, command = int(sys.argv[1]), sys.argv[2:]
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, lambda number, _: signals.append(number))
    # Slurm sends this signal to the trainer before the time limit. The server inherits that it is ignored.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    server = subprocess.Popen(command, start_new_session=True)
    while server.poll() is None and not signals and os.getppid() == trainer:
        time.sleep(POLL_S)
    _end(server)
    return server.returncode or 0


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and all processes of its session: interrupt it twice, then kill."""
    for timeout_s in (SECOND_SIGNAL_S, GRACE_S):
        if server.poll() is None:
            _signal(server, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout_s)
    _signal(server, signal.SIGKILL)
    server.wait()


def _signal(server: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # all processes have ended
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
