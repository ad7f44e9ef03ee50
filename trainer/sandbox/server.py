"""The process that starts the programs of a sandbox. It imports what programs often need, and forks for each program.

It does not read programs, tests or what they write, but passes on open files, so nothing of one program is in the
memory of the next. It ends a process at its deadline or on request, and reports how it ended.
"""

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from trainer.sandbox import run_program
from trainer.sandbox.confine import FOLDER, Limits, Walls, die_with_parent, in_own_processes

# Modules that many programs import.
COMMON = ["bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "io"]
COMMON += ["itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string", "textwrap"]
COMMON += ["time", "typing", "dataclasses", "enum", "numbers", "threading", "ast"]
LONGEST_MESSAGE = 4096
MOST_FILES = 8
OWN = 100  # a child moves its files here before it makes them descriptors 3, 4 and so on


@dataclass(slots=True)
class Child:
    pid: int
    control: socket.socket
    deadline: float
    timed_out: bool = False

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):  # its process group does not exist yet, or no longer exists
            with suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


def main(descriptor: str, settings: str) -> NoReturn:
    """Answer orders from a socket until it closes."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to every process, but only ranks act on it
    for name in COMMON:
        importlib.import_module(name)
    limits, command = json.loads(settings)
    orders, walls = socket.socket(fileno=int(descriptor)), Walls(Limits(**limits), command is not None)
    server = ProgramServer(orders, walls, command)
    server.orders.send(json.dumps(asdict(server.walls.held)).encode())
    os.dup2(1, 2)  # /dev/null, as the trainer reads errors only until here
    gc.collect()
    gc.freeze()  # so that collections in a child do not copy shared memory
    while True:
        server.step()


class ProgramServer:
    def __init__(self, orders: socket.socket, walls: Walls, command: str | None) -> None:
        self.orders, self.walls, self.command = orders, walls, command
        self.children: dict[int, Child] = {}  # by their pidfd
        self.controls: dict[int, Child] = {}
        self.poll = select.poll()
        self.poll.register(orders, select.POLLIN)

    def step(self) -> None:
        """Wait for an order, the end of a child, a request to end one, or a deadline."""
        now = time.monotonic()
        nearest = min((child.deadline for child in self.children.values() if not child.timed_out), default=None)
        # poll() lists orders first, so no descriptor that is closed in this loop is opened again in it
        for ready, _ in self.poll.poll(None if nearest is None else max(0.0, 1000 * (nearest - now))):
            if ready == self.orders.fileno():
                self._order()
            elif ready in self.children:
                self._ended(ready)
            elif ready in self.controls:
                self.controls[ready].kill()
                self.poll.unregister(ready)
        for child in self.children.values():
            if child.deadline <= time.monotonic() and not child.timed_out:
                child.timed_out = True
                child.kill()

    def _order(self) -> None:
        message, files, _, _ = socket.recv_fds(self.orders, LONGEST_MESSAGE, MOST_FILES)
        if not message:  # the trainer has ended
            for child in self.children.values():
                child.kill()
            os._exit(0)
        order = json.loads(message)
        control = socket.socket(fileno=files[0])
        parent, pid = os.pidfd_open(os.getpid()), os.fork()
        if pid == 0:
            self._become(parent, order, files[1:])
        for file in (parent, *files[1:]):
            os.close(file)
        child = Child(pid, control, time.monotonic() + order["seconds"])
        watched = os.pidfd_open(pid)
        self.children[watched] = self.controls[control.fileno()] = child
        self.poll.register(watched, select.POLLIN)
        self.poll.register(control, select.POLLIN)

    def _ended(self, watched: int) -> None:
        child = self.children.pop(watched)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        child.kill()  # ends what it has started; its process id is in use until waitpid()
        _, status = os.waitpid(child.pid, 0)
        del self.controls[child.control.fileno()]
        for place in (watched, child.control.fileno()):
            with suppress(KeyError):
                self.poll.unregister(place)
        result = {"status": os.waitstatus_to_exitcode(status), "timed_out": child.timed_out}
        with suppress(OSError):  # the trainer no longer waits for it
            child.control.send(json.dumps(result).encode())
        child.control.close()
        os.close(watched)

    def _become(self, parent: int, order: dict[str, Any], files: list[int]) -> NoReturn:
        """Become the process of a program, in a new session, with these files and no others."""
        with suppress(BaseException):
            os.setsid()
            die_with_parent(parent)
            if self.walls.has_own_processes:
                in_own_processes()
            first_free = _arrange(order["kind"], files)
            self.walls.enter()
            os.closerange(first_free, 1 << 16)
            if order["kind"] == "command":
                assert self.command is not None
                _start(self.command)
            run_program.run(order["kind"], order["name"], order["first"])
        os._exit(1)


def _arrange(kind: str, files: list[int]) -> int:
    """Make the files descriptors 3, 4 and so on. For a program make its input and output 0 and 1, and keep only the
    source as 3. Return the first descriptor that is not needed."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, OWN) for file in files]
    for number, file in enumerate(high, start=3):
        os.dup2(file, number)
    if kind in ("program", "command"):
        os.dup2(4, 0)
        os.dup2(5, 1)
        return 4
    return 3 + len(high)


def _start(command: str) -> NoReturn:
    """Write the program to a file, and run the command in its folder."""
    with open(3, "rb") as source, open(os.path.join(FOLDER, "program"), "wb") as file:
        file.write(source.read())
    os.execv("/bin/sh", ["/bin/sh", "-c", command])
