"""Child processes that answer requests, and can be killed.

    pool = ChildPool("trainer.answers.symbolic:comparer", workers=2, deadline_s=5.0)
    pool.ask(["x+1", "1+x"])     # what the child returns, or None

    parent  one line of JSON  ->  child
    parent  <-  one line of JSON  child

A child is for work that may never end, or may do harm. It is started when it is first needed, by a fresh interpreter,
so it inherits neither torch nor CUDA; it calls the named function once, and then what that returns for each request.
It ends when its input closes, and therefore when the parent dies; if it is computing at that moment, its own alarm ends
it a second after the deadline.
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
from importlib import import_module
from queue import LifoQueue
from typing import Any

from trainer.errors import RewardError

READY = "ready"
START_S = 60.0  # importing sympy from a cold network disk
GRACE_S = 1.0  # the parent kills first; the child's own alarm is for a parent that died
MEMORY_BYTES = 2 << 30  # a tower of powers fills any memory
LONGEST_REPLY = 1 << 20

# What a library raises on nonsense; RecursionError is a RuntimeError.
NONSENSE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError,
    SyntaxError,
)  # fmt: skip


class ChildPool:
    """Asks children. It may be used from several threads; each request has a child to itself."""

    def __init__(self, function: str, workers: int, deadline_s: float) -> None:
        self.hangs = 0  # requests ended by the deadline
        self.failures = 0  # requests in which the child died or raised
        self.deaths = 0  # those in which it died
        self._function, self._deadline_s, self._workers = function, deadline_s, workers
        self._counting = threading.Lock()
        self._closed = False
        # None stands for a child that is not running. Last in, first out: running children are used first.
        self._children: LifoQueue[_Child | None] = LifoQueue()
        for _ in range(workers):
            self._children.put(None)

    def close(self) -> None:
        """End all children, after waiting for the requests that are running."""
        if self._closed:
            return
        self._closed = True
        for child in [self._children.get() for _ in range(self._workers)]:
            if child is not None:
                child.kill()

    def ask(self, request: Any) -> Any:
        """Return the reply; None if the child raised, died, or took too long."""
        assert not self._closed, "the pool is closed"
        child = self._children.get()
        reply: str | None = ""
        try:
            child = child or _Child(self._function, self._deadline_s)
            reply = child.ask(request)
        finally:
            if child is not None and not reply:  # it hangs, died, or was interrupted
                child.kill()
                child = None
            self._children.put(child)
        answer = json.loads(reply) if reply else None
        if answer is None:
            with self._counting:
                self.hangs += reply is None
                self.failures += reply is not None
                self.deaths += reply == ""
        return answer


class _Child:
    def __init__(self, function: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        # With the parent's sys.path, the child finds what the parent finds, however that was installed.
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve"
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code}; serve({function!r}, {deadline_s + GRACE_S})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        if self._read(START_S) != json.dumps(READY):
            self.kill()
            by_hand = f"{sys.executable} -c 'from {__name__} import serve; serve(\"{function}\", 1)'"
            raise RewardError(f"the process of {function} did not start. To see why, run: {by_hand}")

    def ask(self, request: Any) -> str | None:
        """Return the reply: empty if the child died, None if it took too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            return ""
        return self._read(self._deadline_s)

    def _read(self, seconds: float) -> str | None:
        assert self._process.stdout is not None
        until, line = time.monotonic() + seconds, b""
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            part = self._process.stdout.read(LONGEST_REPLY)
            if not part or len(line) > LONGEST_REPLY:
                return ""
            line += part
        return line.decode().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


# ------------------------------------------------------------------------------------------------------- in the child


def serve(function: str, alarm_s: float) -> None:
    """Answer requests from standard input until it closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends the process, and no handler can swallow that
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process; only ranks act on it
    module, _, name = function.partition(":")
    answer = getattr(import_module(module), name)()
    print(json.dumps(READY), file=replies)
    for request in iter(sys.stdin.buffer.readline, b""):
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        try:
            reply = answer(json.loads(request))
        except NONSENSE:
            reply = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies)
