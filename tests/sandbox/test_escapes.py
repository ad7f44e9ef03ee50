"""Programs that try to get out of the sandbox do not, and each of them succeeds where there is none."""

import errno
import os
import re
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from string import Template

import pytest

from tests.conftest import ROOT, until
from tests.sandbox.escapes import ESCAPES, FORGERIES, NUMBERS, PRELUDE, TESTS
from tests.sandbox.lacking import python_without
from trainer.sandbox.confine import FOLDER, Limits
from trainer.sandbox.pool import Sandbox

SECRET = "the canary sings"
COMMAND = "/usr/bin/python3 program"
LIMITS = Limits(seconds=20, memory_mb=256, processes=16, file_mb=1, output_kb=64)
SECONDS = 20.0  # for an escape, in the sandbox or without it
HANGS = ["loop", "sleep", "ignore all signals"]  # programs that take 1.2 seconds
# What a kernel without some part, or a user who is not root, answers.
LACKING = {errno.ENOSYS, errno.EAFNOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP}
LACKING |= {errno.ENODEV}
NOT_ROOT = {errno.EPERM, errno.EACCES}
REPORT = """
import sys
sys.excepthook = lambda kind, error, at: print("FAILED", getattr(error, "errno", 0), repr(error))
"""


@pytest.fixture(scope="module")
def sandbox(request, tmp_path_factory) -> Iterator[Sandbox]:
    """A sandbox of Python programs; of a command; or one where there are no new namespaces, as in most containers:
    Landlock and seccomp are left."""
    kind, python = getattr(request, "param", ""), sys.executable
    if kind == "in a container":
        python = python_without("UNSHARE", tmp_path_factory.mktemp("python"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTET_CANARY", SECRET)
        patch.setattr(sys, "executable", python)
        sandbox = Sandbox(LIMITS, COMMAND if kind == "of a command" else None)
    with sandbox:
        held = sandbox.held
        assert not (held.namespaces and kind == "in a container")
        has_python = held.namespaces and Path(COMMAND.split(maxsplit=1)[0]).exists()
        if not held.is_enough or (kind == "of a command" and not has_python):
            pytest.skip(f"this machine cannot contain a program in: {held}")
        yield sandbox


class Canaries:
    """What an escape may harm: files, a process, servers."""

    def __init__(self, folder: Path) -> None:
        self.home, self.own, self.mark = folder / "home", folder / "own", folder / "mark"
        for place in (self.home, self.own, self.home / "empty"):
            place.mkdir()
        self.file = self.home / "secret.txt"
        self.file.write_text(SECRET)
        self.file.chmod(0o644)
        self.state = self.file.stat()
        self.victim = subprocess.Popen(["sleep", "100"], env={"CANARY": SECRET}, start_new_session=True)
        until(Path(f"/proc/{self.victim.pid}/environ").read_bytes)  # the kernel fills it a moment after the start
        self.tcp, self.udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.unix, self.abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        for server in (self.tcp, self.udp):
            server.bind(("127.0.0.1", 0))
        self.unix.bind(str(folder / "unix"))
        self.name = f"octet-canary-{os.getpid()}"
        self.abstract.bind(f"\0{self.name}")
        for server in (self.tcp, self.unix, self.abstract):
            server.listen()
        self.servers = (self.tcp, self.udp, self.unix, self.abstract)

    def source(self, escape: str, own: str) -> str:
        places = {"HOME": self.home, "OWN": own, "MARK": self.mark, "ROOT": ROOT, "VICTIM": self.victim.pid}
        places |= {"TCP": self.tcp.getsockname()[1], "UDP": self.udp.getsockname()[1], "UNIX": self.unix.getsockname()}
        places |= {"ABSTRACT": self.name, "TMP": f"/tmp/{self.name}", **NUMBERS}
        return PRELUDE + Template(escape).substitute(places)

    def are_well(self) -> bool:
        """Return True if the files are as they were, the process runs as it did, and nobody has called the servers."""
        now, before = self.file.stat(), self.state
        return (
            self.file.read_text() == SECRET
            and (now.st_mode, now.st_mtime_ns, now.st_uid) == (before.st_mode, before.st_mtime_ns, before.st_uid)
            and sorted(os.listdir(self.home)) == ["empty", "secret.txt"]
            and self.victim.poll() is None
            and os.getpriority(os.PRIO_PROCESS, self.victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
            and not select.select(self.servers, [], [], 0)[0]
            and not Path(f"/tmp/{self.name}").exists()
        )

    def close(self) -> None:
        self.victim.kill()
        self.victim.wait()
        Path(f"/tmp/{self.name}").unlink(missing_ok=True)
        for server in self.servers:
            server.close()


@pytest.fixture
def canaries(tmp_path: Path) -> Iterator[Canaries]:
    canaries = Canaries(tmp_path)
    yield canaries
    canaries.close()


MAY_START_PROGRAMS = {name for name in ESCAPES if name.startswith("start a program") and "memory" not in name}
MAY_START_PROGRAMS |= {"fork", "become another program", "outlive the program"}  # which is killed nevertheless


@pytest.mark.parametrize("name", [name for name in ESCAPES if name not in HANGS])
@pytest.mark.parametrize(
    "sandbox", ["", "in a container", pytest.param("of a command", marks=pytest.mark.slow)], indirect=True
)
def test_an_escape_is_held(name, sandbox, canaries):
    ran = sandbox.run(canaries.source(ESCAPES[name], FOLDER), b"", SECONDS)
    assert ran.output.startswith(b"TRIES")  # so the program before has not disturbed this one
    assert (b"ESCAPED" in ran.output) is (sandbox.command is not None and name in MAY_START_PROGRAMS)
    assert not ran.timed_out
    if name == "outlive the program":
        time.sleep(0.6)
        assert not canaries.mark.exists()
    assert canaries.are_well()


@pytest.mark.parametrize("name", HANGS)
def test_a_program_that_hangs_is_ended(name, sandbox, canaries):
    ran = sandbox.run(canaries.source(ESCAPES[name], FOLDER), b"", 0.8)
    assert ran.timed_out
    assert ran.output in (b"TRIES ", b"")  # a busy machine may not have begun the program within the limit


@pytest.mark.parametrize("name", ESCAPES)
def test_an_escape_succeeds_without_the_sandbox(name, canaries):
    with canaries.file.open("rb") as kept:
        os.set_inheritable(kept.fileno(), True)
        command = [sys.executable, "-I", "-c", REPORT + canaries.source(ESCAPES[name], str(canaries.own))]
        own = {"env": {**os.environ, "OCTET_CANARY": SECRET}, "cwd": canaries.own, "pass_fds": [kept.fileno()]}
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=False, **own)
    failed = re.search(rb"FAILED (\d+)", done.stdout)
    if failed and int(failed[1]) in LACKING | (NOT_ROOT if os.getuid() else set()):
        pytest.skip(f"this kernel or user cannot do it at all: {done.stdout.decode().strip()}")
    assert b"ESCAPED" in done.stdout, done.stdout


# ---------------------------------------------------------------- forged results

# What a harness without walls does: the tests behind the program, and its exit status or its report as the result.
NAIVE = """
import os, sys
SOURCE = open("tests.py").read()
names = {"SOURCE": SOURCE}
exec(open("program.py").read(), names)
names["SOURCE"] = names["SOURCE"] and SOURCE
exec(compile(names["SOURCE"], "tests.py", "exec"), names)
os.write(int(sys.argv[1]), b'[3, 3, ""]')
"""


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_result_is_worth_nothing(name, sandbox):
    verdict = sandbox.judge(FORGERIES[name], TESTS, "add")
    assert verdict.passed == 0 < verdict.total


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_result_is_believed_by_a_harness_that_runs_program_and_tests_together(name, tmp_path):
    (tmp_path / "program.py").write_text(FORGERIES[name])
    (tmp_path / "tests.py").write_text(TESTS)
    reading, writing = os.pipe()
    command = [sys.executable, "-c", NAIVE, str(writing)]
    with open(reading, "rb") as report:
        own = {"cwd": tmp_path, "pass_fds": [writing], "stderr": subprocess.DEVNULL}
        done = subprocess.run(command, timeout=SECONDS, check=False, **own)
        os.close(writing)
        assert done.returncode == 0 or report.read().startswith(b"[3, 3")


def test_an_honest_program_passes(sandbox):
    assert sandbox.judge("def add(a, b): return a + b", TESTS, "add").passed == 3
