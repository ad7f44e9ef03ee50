"""Run untrusted programs, each in its own process, which the kernel confines.

    with Sandbox(Limits(seconds=2)) as sandbox:
        sandbox.run("print(int(input()) + 1)", b"41").output                     # b"42\n"
        sandbox.judge("def f(x): return x + 1", "assert f(41) == 42", "f")       # Assertions(passed=1, total=1)

A sandbox may be called from several threads; the processes run in parallel. It ends with the block or with its object.
"""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from trainer.errors import RewardError
from trainer.sandbox.confine import FOLDER, Held, Limits

T = TypeVar("T")

START_S = 60.0
# The environment of programs. With a fixed hash seed, sets have one order, so a program has one result.
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": FOLDER, "TMPDIR": FOLDER}
ENVIRONMENT |= {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "PYTHONDONTWRITEBYTECODE": "1"}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Ran:
    """How a program ended. `status` is -N for a program that signal N killed; `cut` says that it wrote too much."""

    output: bytes
    status: int
    timed_out: bool
    cut: bool


@dataclass(frozen=True, slots=True)
class Assertions:
    """How many of the assertions in tests hold. `fault` says what is wrong with the tests themselves."""

    passed: int
    total: int
    fault: str = ""
    timed_out: bool = False


class Ended(Exception):
    """The process that starts programs has ended."""


class Sandbox(AbstractContextManager["Sandbox"]):
    def __init__(self, limits: Limits, command: str | None = None) -> None:
        self.limits = limits
        self.command = command
        self._starting = threading.Lock()
        self._start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, source: str, given: bytes, seconds: float | None = None) -> Ran:
        """Run a program on an input, by `command` if there is one, otherwise as Python."""
        return self._twice(lambda: self._run(source, given, self.limits.seconds if seconds is None else seconds))

    def judge(self, source: str, tests: str, name: str, first: bool = False) -> Assertions:
        """Run tests of a function in a program. With `first`, stop at the first assertion that does not hold."""
        return self._twice(lambda: self._judge(source, tests, name, first))

    def _twice(self, work: Callable[[], T]) -> T:
        """Do work, and once more if the process that starts programs ends, which may happen when memory runs out."""
        for _ in range(2):
            process = self._process
            with suppress(Ended):
                return work()
            with self._starting:
                if self._process is process:  # no other thread has restarted it
                    process.kill()
                    self.close()
                    self._start()
        raise RewardError("the process that starts programs ended twice. Is there memory left?")

    def _run(self, source: str, given: bytes, seconds: float) -> Ran:
        kind, most = "program" if self.command is None else "command", self.limits.output_kb << 10
        reading, writing = os.pipe()
        with open(reading, "rb") as output:
            files = [_file(source.encode(errors="replace")), _file(given), writing]
            with self._started(kind, files, seconds) as control:
                text = output.read(most + 1)
                if len(text) > most:
                    _end(control)
                ended = _how_it_ended(control)
        return Ran(text[:most], ended["status"], ended["timed_out"], len(text) > most)

    def _judge(self, source: str, tests: str, name: str, first: bool) -> Assertions:
        (asked, asks), (replied, replies), (reading, writing) = os.pipe(), os.pipe(), os.pipe()
        with open(reading, "rb") as output:
            function = [_file(source.encode(errors="replace")), asked, replies]
            tester = [_file(tests.encode(errors="replace")), replied, asks, writing]
            with (
                self._started("function", function, self.limits.seconds, name) as control_of_function,
                self._started("judge", tester, self.limits.seconds, name, first) as control,
            ):
                text = output.read(self.limits.output_kb << 10)
                ended = _how_it_ended(control)
                _end(control_of_function)
                timed_out = _how_it_ended(control_of_function)["timed_out"] or ended["timed_out"]
        return _assertions(text, timed_out)

    @contextmanager
    def _started(
        self, kind: str, files: list[int], seconds: float, name: str = "", first: bool = False
    ) -> Iterator[socket.socket]:
        """Start a process with these files, close them here, and yield the socket that will say how it ended."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {"kind": kind, "name": name, "first": first, "seconds": seconds}
        with control, theirs:
            try:
                socket.send_fds(self._orders, [json.dumps(order).encode()], [theirs.fileno(), *files])
            except OSError:
                raise Ended from None
            finally:
                for file in files:
                    os.close(file)
            theirs.close()
            yield control

    def _start(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = json.dumps([asdict(self.limits), self.command])
        # The child needs the parent's sys.path to find the same packages, however they were installed.
        start = f"import sys; sys.path[:] = {sys.path!r}; from trainer.sandbox.server import main; main(*sys.argv[1:])"
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")},  # for a cluster's Python
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            self._orders.settimeout(START_S)
            try:
                self.held = Held(**json.loads(self._orders.recv(1024)))
            except (OSError, ValueError):
                self._orders.close()
                self._process.kill()
                why = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
                raise RewardError(f"the process that starts programs did not start: {why or 'it hangs'}.") from None
            self._orders.settimeout(None)
        self.close = weakref.finalize(self, _close, os.getpid(), self._orders, self._process)


def _close(owner: int, orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End everything that runs in a sandbox."""
    if os.getpid() == owner:  # and not in a process that user code has forked, which has the socket, too
        with suppress(OSError):  # it has ended by itself
            orders.shutdown(socket.SHUT_RDWR)
    orders.close()
    process.wait()


def _assertions(text: bytes, timed_out: bool) -> Assertions:
    """Read the verdict of tests. There is none after the deadline, or if the tests ended their own process."""
    with suppress(ValueError, TypeError, RecursionError):  # the tests are data, and may write anything
        passed, total, fault = json.loads(text)
        if isinstance(passed, int) and isinstance(total, int) and 0 <= passed <= total:
            return Assertions(passed, total, str(fault), timed_out)
    return Assertions(0, 1, "", timed_out)


def _file(content: bytes) -> int:
    """Return the descriptor of a read-only file in memory."""
    file = os.memfd_create("octet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(file, "wb", closefd=False) as writing:
        writing.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _end(control: socket.socket) -> None:
    with suppress(OSError):  # the process has ended by itself
        control.shutdown(socket.SHUT_WR)


def _how_it_ended(control: socket.socket) -> dict[str, Any]:
    with suppress(ConnectionError):
        if message := control.recv(1024):
            return dict(json.loads(message))
    raise Ended
