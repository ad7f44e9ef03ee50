"""A child process that answers requests, one line of JSON each, and can be killed.

    child = Child("trainer.answers.symbolic:comparer", deadline_s=5.0)
    child.ask(["x+1", "1+x"])     # the child's reply, or None

A child does work that may never end or may do harm. It starts at the first request, in a fresh interpreter, so it
inherits neither torch nor CUDA. It calls the named function once, and what that returns answers each request. It ends
with its `Child` object, and when its input closes, and therefore when the parent dies; if it is computing at that
moment, its own alarm ends it a second after the deadline.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from importlib import import_module
from typing import Any

from trainer.errors import RewardError

READY = "ready"
START_S = 60.0  # enough to import sympy from a cold network disk
GRACE_S = 1.0  # the parent kills at the deadline; the child's own alarm comes later, in case the parent has died
MEMORY_BYTES = 2 << 30  # a tower of powers would fill any memory
LONGEST_REPLY = 1 << 20  # bytes


class Died(Exception):
    """The child has died during a request."""


class Child:
    """Answers one request at a time, from any thread. A process that hangs is killed; the next request starts one."""

    def __init__(self, function: str, deadline_s: float) -> None:
        self.hangs = 0  # requests ended by the deadline
        self.failures = 0  # requests in which the child died or raised
        self._function, self._deadline_s = function, deadline_s
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Any) -> Any:
        """Return the reply, or None if the child raised an error or took too long. Raise Died if it died."""
        with self._asking:
            reply: str | None = ""
            try:
                process = self._process or self._start()
                assert process.stdin is not None
                with suppress(BrokenPipeError):  # the child has died, so its reply is empty
                    process.stdin.write(json.dumps(request).encode() + b"\n")
                reply = _read(process, self._deadline_s)
            finally:
                if not reply and self._process is not None:  # the child hangs or died, or this thread was interrupted
                    self._end()
                    self._process = None
            answer = json.loads(reply) if reply else None
            self.hangs += reply is None
            self.failures += reply is not None and answer is None
        if reply == "":
            raise Died
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # The child needs the parent's sys.path to find the same packages, however they were installed.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", f"{code}; serve({self._function!r}, {self._deadline_s + GRACE_S})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # only the parent gets a Ctrl-C
        )
        self._end = weakref.finalize(self, _end, process)
        if _read(process, START_S) != json.dumps(READY):
            by_hand = f"{sys.executable} -c 'from {__name__} import serve; serve(\"{self._function}\", 1)'"
            raise RewardError(f"the process of {self._function} did not start. To see why, run: {by_hand}")
        return process


def _end(process: subprocess.Popen[bytes]) -> None:
    with process:  # closes the pipes and waits for the process
        process.kill()


def _read(process: subprocess.Popen[bytes], seconds: float) -> str | None:
    """Return the next line. It is empty if the child died, and None if it took too long."""
    assert process.stdout is not None
    until, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        part = process.stdout.read(LONGEST_REPLY)
        if not part or len(line) > LONGEST_REPLY:
            return ""
        line += part
    return line.decode().strip()


# ------------------------------------------------------------------------------------------------------- in the child


def serve(function: str, alarm_s: float) -> None:
    """Answer requests from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the output of libraries out of the replies
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process; no handler can swallow the alarm
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process, but only ranks act on it
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)()
    print(json.dumps(READY), file=replies)
    for request in iter(sys.stdin.buffer.readline, b""):
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        try:
            reply = answer(json.loads(request))
        except Exception:  # noqa: BLE001  libraries raise errors of many kinds for nonsense
            reply = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies)
