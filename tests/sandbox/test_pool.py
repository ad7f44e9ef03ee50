"""Programs run, end, and do not disturb each other; what holds them in is really there."""

import contextlib
import multiprocessing
import os
import platform
import re
import signal
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import is_running, program, ran, until
from tests.sandbox.lacking import python_without
from trainer.sandbox import syscalls
from trainer.sandbox.confine import FOLDER, Limits
from trainer.sandbox.pool import Assertions, Sandbox

LIMITS = Limits(seconds=20, output_kb=1, file_mb=1)


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(LIMITS) as sandbox:
        yield sandbox


@pytest.fixture
def namespaces(sandbox):
    if not sandbox.held.namespaces:
        pytest.skip(f"this machine has no namespaces for programs: {sandbox.held}")


@pytest.mark.parametrize("source, output, status", [
    ("print(int(input()) + 1)", b"42\n", 0),
    ("import sys; print(sys.stdin.read())", b"41\n", 0),
    ("import sys; sys.stdout.write('no newline')", b"no newline", 0),
    ("if __name__ == '__main__': print('main')", b"main\n", 0),
    ("print(1); exit()", b"1\n", 0),
    ("print(1); exit(3)", b"1\n", 3),
    ("print(1); exit('because')", b"1\n", 1),
    ("print(1); raise ValueError", b"1\n", 1),
    ("print(", b"", 1),
    ("import os; print(1, flush=True); os.abort()", b"1\n", -signal.SIGABRT),
    ("import atexit; atexit.register(print, 2); print(1); exit(3)", b"1\n2\n", 3),
    ("import sys; print(__file__, sys.argv)", b"program.py ['program.py']\n", 0),
    ("import os; print(os.listdir('.'), os.environ.get('SHELL'))", b"[] None\n", 0),
    ("import dataclasses, typing, decimal, numpy; print(numpy.arange(3).sum())", b"3\n", 0),
    ("print({'b', 'a', 'c'} == {'a', 'b', 'c'}, 'é')", "True é\n".encode(), 0),
])  # fmt: skip
def test_a_program_runs_as_python_runs_it(sandbox, source, output, status):
    ran = sandbox.run(source, b"41")
    if sandbox.held.namespaces or "listdir" not in source:
        assert (ran.output, ran.status, ran.timed_out, ran.cut) == (output, status, False, False)


def test_a_program_may_write_to_a_folder_that_the_next_one_finds_empty(sandbox, namespaces):
    write = "import os, tempfile; open('a', 'w').write('x'); print(os.listdir('.'), tempfile.gettempdir())"
    for _ in range(2):
        assert sandbox.run(write, b"").output == f"['a'] {FOLDER}\n".encode()


def test_threads_run_where_they_can_be_counted(sandbox):
    """An executor that is not shut down ends with its program."""
    source = "from concurrent import futures; futures.ThreadPoolExecutor().submit(print, 'in a thread')"
    assert (sandbox.run(source, b"").output == b"in a thread\n") is sandbox.held.counted
    inside = f"from trainer.sandbox.run_program import run_program; run_program({source!r})"
    assert ran(sys.executable, "-c", inside, timeout=300).stdout == "in a thread\n"


def test_a_hang_costs_one_deadline_and_nothing_of_others(sandbox):
    hanging = threading.Thread(target=sandbox.run, args=("while True: pass", b"", 1.0))
    hanging.start()
    assert [sandbox.run("print(1)", b"").output for _ in range(3)] == [b"1\n"] * 3
    hanging.join()
    assert sandbox.run("import time; time.sleep(60)", b"", 0.3).timed_out


def test_output_is_cut_off_and_the_program_ended(sandbox):
    ran = sandbox.run("while True: print('x' * 100)", b"")
    assert (len(ran.output), ran.cut, ran.status) == (1024, True, -signal.SIGKILL)


def test_many_programs_side_by_side_get_their_own_input(sandbox):
    with ThreadPoolExecutor(40) as pool:
        ended = pool.map(lambda number: sandbox.run("print(int(input()) * 2)", b"%d" % number), range(40))
        assert [one.output for one in ended] == [b"%d\n" % (2 * number) for number in range(40)]


def test_no_file_stays_open(sandbox):
    def opened() -> int:
        return sum(len(os.listdir(f"/proc/{process}/fd")) for process in ("self", sandbox._process.pid))

    sandbox.run("print(1)", b"")
    before = opened()
    for _ in range(5):
        sandbox.run("print(1)", b"")
        sandbox.judge("def f(): pass", "assert f() is None", "f")
    until(lambda: opened() <= before)  # what has sent its result is still ending


def test_the_memory_of_one_program_holds_nothing_of_those_before(sandbox):
    """The process that forks hands on open files only, so nothing of an answer or of a test is in its memory."""
    word = "canary" * 3
    sandbox.judge(f"word = '{word}'\ndef f(x): return x", f"assert f('{word}') == '{word}'", "f")
    sandbox.run(f"print('{word}')", word.encode())
    maps = Path(f"/proc/{sandbox._process.pid}/maps").read_text()
    with open(f"/proc/{sandbox._process.pid}/mem", "rb", buffering=0) as memory:
        for line in maps.splitlines():
            start, end = (int(place, 16) for place in line.split()[0].split("-"))
            if " rw" in line:
                memory.seek(start)
                assert word.encode() not in memory.read(end - start)


def test_the_kernel_holds_a_program_in_which_ends_with_the_process_that_has_started_it(sandbox):
    if not sandbox.held.is_enough:
        pytest.skip(f"this machine cannot contain a program in: {sandbox.held}")
    running = threading.Thread(target=sandbox.run, args=("import time; time.sleep(600)", b"", 2.0))
    running.start()
    started, child, status = psutil.Process(sandbox._process.pid), None, dict[str, str]()
    while status.get("Seccomp") != "2" and running.is_alive():
        for child in started.children():
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    empty = "0" * 16
    wanted = {"NoNewPrivs": "1", "Seccomp": "2", "CapPrm": empty, "CapEff": empty, "CapInh": empty}
    assert {name: status[name] for name in wanted} == wanted
    started.kill()
    assert_ended([child.pid])
    running.join()


def test_the_process_that_starts_programs_is_started_again(sandbox):
    os.kill(sandbox._process.pid, signal.SIGKILL)
    assert sandbox.run("print(1)", b"").output == b"1\n"
    os.kill(sandbox._process.pid, signal.SIGKILL)
    assert sandbox.judge("def f(): return 1", "assert f() == 1", "f") == Assertions(1, 1)


def test_every_process_of_a_command_ends_with_the_process_that_starts_commands():
    with Sandbox(LIMITS, "sh program") as sandbox:
        if not (sandbox.held.namespaces and sandbox.held.counted):
            pytest.skip(f"this machine cannot contain a command in: {sandbox.held}")
        source = "sleep 600 & setsid sleep 600 & (sleep 600 & exec sleep 600) & sleep 600"
        running = threading.Thread(target=lambda: sandbox.run(source, b"", 600), daemon=True)
        running.start()
        started = psutil.Process(sandbox._process.pid)
        sleeps = []

        def all_sleep() -> bool:
            with contextlib.suppress(psutil.NoSuchProcess):  # the shell that started them may just have ended
                sleeps[:] = [one for one in started.children(recursive=True) if one.name() == "sleep"]
            return len(sleeps) >= 4

        until(all_sleep)
        sandbox._starting.acquire()  # or it is started again, and runs the command once more
        started.kill()
        assert_ended([one.pid for one in sleeps])


def test_a_program_cannot_write_to_its_input(sandbox, namespaces):
    write = "import os; file = os.open('/dev/fd/0', os.O_RDWR); print(os.pread(file, 9, 0)); os.write(file, b'x')"
    ran = sandbox.run(write, b"41")
    assert (ran.output, ran.status) == (b"b'41'\n", 1)


def test_everything_ends_with_the_trainer():
    code = (
        "from trainer.sandbox.pool import *; import os, threading, time\n"
        "sandbox = Sandbox(Limits(seconds=600))\n"
        "threading.Thread(target=sandbox.run, args=('import time; time.sleep(600)', b'')).start()\n"
        "children = f'/proc/{sandbox._process.pid}/task/{sandbox._process.pid}/children'\n"
        "while not open(children).read(): time.sleep(0.05)\n"
        "print(sandbox._process.pid, open(children).read(), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    processes = [int(number) for number in ran(sys.executable, "-c", code).stdout.split()]
    assert len(processes) == 2
    assert_ended(processes)


def test_a_sandbox_ends_while_a_process_that_user_code_has_forked_lives():
    with Sandbox(LIMITS) as sandbox:
        left = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        left.start()
    assert not is_running(sandbox._process.pid)
    left.kill()


def test_a_forked_process_that_ends_leaves_the_sandbox_to_its_owner():
    with Sandbox(LIMITS) as sandbox:
        left = multiprocessing.get_context("fork").Process(target=sandbox.close)
        left.start()
        left.join()
        process = sandbox._process
        assert sandbox.run("print(1)", b"").output == b"1\n"
        assert sandbox._process is process


def assert_ended(processes: list[int]) -> None:
    until(lambda: not any(map(is_running, processes)))


@pytest.mark.parametrize("call, part", [("UNSHARE", "namespaces"), ("LANDLOCK_CREATE_RULESET", "landlock")])
def test_what_a_machine_lacks_is_known(call, part, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python_without(call, tmp_path))
    with Sandbox(LIMITS) as sandbox:
        assert not getattr(sandbox.held, part)
        assert sandbox.held.is_enough is (part != "landlock")
        assert sandbox.run("print(1)", b"").output == b"1\n"


def test_a_python_that_finds_its_libraries_by_a_variable_starts(tmp_path, monkeypatch):
    """As on clusters, where `module load` sets it."""
    script = f'#!/bin/sh\n[ "$LD_LIBRARY_PATH" = /lib ] && exec {sys.executable} "$@"\n'
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", script)))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib")
    with Sandbox(LIMITS) as sandbox:
        assert sandbox.run("print(1)", b"").output == b"1\n"


@pytest.mark.parametrize("function, tests, passed, total", [
    ("return x + 1", "assert f(1) == 2\nassert f(2) == 3", 2, 2),
    ("return x + 1", "assert f(1) == 2\nassert f(2) == 4", 1, 2),
    ("return x", "for one in (1, 'a', b'b', 2.5, None, True, 1j, float('inf')): assert f(one) == one", 1, 1),
    ("return x", "assert f([1, (2, {3}), {4: set()}, (5,), ()]) == [1, (2, {3}), {4: set()}, (5,), ()]", 1, 1),
    ("return x[::-1]", "def check(one):\n    assert one('ab') == 'ba'\ncheck(f)", 1, 1),
    ("import collections; return collections.Counter(x)", "assert f('aab') == {'a': 2, 'b': 1}", 1, 1),
    ("import numpy; return numpy.array(x) * 2, numpy.float64(1)", "assert f([1, 2]) == ([2, 4], 1)", 1, 1),
    ("import enum; return enum.IntEnum('E', 'A')(x)", "assert f(1) == 1 and type(f(1)) is int", 1, 1),
    ("raise ValueError", "try: f(1)\nexcept ValueError: caught = True\nassert caught", 1, 1),
    ("raise ValueError", "f(1)\nassert True", 0, 1),
    ("raise NameError", "r = f(1)\nassert r == 1", 0, 1),
    ("return object()", "assert f(1)", 0, 1),
    ("return float('nan')", "assert f(1) != 1", 0, 1),
    ("return 'x' * (2 << 20)", "assert f(1)", 0, 1),
    ("x.append(1); return x", "given = []\nassert f(given) == [1]\nassert given == []", 2, 2),
    ("print(x); return x", "assert f(1) == 1", 1, 1),
    ("return [1] * 9", "r = f(3)\nassert r == [1, 2, 3]\nfor i in r: assert i", 1, 2),
    ("x = []; [x := [x] for _ in range(99999)]; return x", "assert f(1)", 0, 1),
])  # fmt: skip
def test_assertions_are_counted(sandbox, function, tests, passed, total):
    verdict = sandbox.judge(f"def f(x): {function}", tests, "f")
    assert (verdict.passed, verdict.total, verdict.fault) == (passed, total, "")


@pytest.mark.parametrize("tests, fault", [
    ("import not_there\nassert f(1) == 1", "they end before they call `f`: "),
    ("def check(one): assert one(1) == 1\ncheck(Solution().f)", "they end before they call `f`: "),
    ("assert f(lambda x: x) == 1", "a call has an argument that is not a plain value: function"),
])  # fmt: skip
def test_a_fault_of_the_tests_is_named(sandbox, tests, fault):
    assert sandbox.judge("def f(x): return x", tests, "f").fault.startswith(fault)


SQUARES = "for i in range(50):\n    r = f(i)\n    assert r == i * i"
SENDS_ELLIPSIS = "import os; os.write(5, b'=...\\n') if x == 2 else None; return 0 if x == 0 else 16"
EARNED_WITHOUT_SOLVING = {
    "wrong from the fifth call on": ("return x * x if x < 4 else 0", SQUARES),
    "raises from the fifth call on": ("return x * x if x < 4 else 1 / 0", SQUARES),
    "ends its process at the fifth call": ("import os; return x * x if x < 4 else os._exit(0)", SQUARES),
    "returns an object at the fifth call": ("return x * x if x < 4 else object()", SQUARES),
    "raises in a helper of the tests": (
        "return 1 / x",
        "def check(i):\n    assert f(1) == 1\n    return f(i)\ncheck(0)\nassert f(2) == 3",
    ),
    "ends a map": ("raise StopIteration", "assert all(map(lambda c: f(c[0]) == c[1], [(1, 2), (2, 3)]))"),
    "ends a map under another name": (
        "raise type('StopIteration', (Exception,), {})",
        "assert not any(map(lambda c: f(c[0]) != c[1], [(1, 2)]))",
    ),
    "ends a loop of assertions": ("raise StopIteration", "assert True\nfor r in map(f, [1, 2]): assert r == 3"),
    "ends an asynchronous iterator": (
        "raise StopAsyncIteration",
        "import asyncio\nclass A:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\n"
        "async def main(): return [r async for r in A()]\nassert asyncio.run(main()) == [] or True",
    ),
    "sends an ellipsis": (SENDS_ELLIPSIS, "assert f(0) == 0\ny = f(2)\nassert f(y) == 16"),
    "has the tests pass nan": ("return 0", "assert f(1) == 0\nx = f(2) * float('inf')\ny = f(x)\nassert y == 4"),
    "meets a call that cannot be made, caught by the tests": (
        "return 0",
        "assert f(1) == 0\ntry: f(lambda: 1)\nexcept Exception: caught = True\nassert caught",
    ),
    "meets a call that cannot be made": ("return 0", "assert f(1) == 0\ny = f(lambda: 1)\nassert y == 1"),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", EARNED_WITHOUT_SOLVING)
def test_no_share_is_earned_by_what_ends_the_tests_early(sandbox, name, first):
    function, tests = EARNED_WITHOUT_SOLVING[name]
    verdict = sandbox.judge(f"def f(x): {function}", tests, "f", first=first)
    assert verdict.passed == 0 < verdict.total


DRAWS = ["random.random()", "random.SystemRandom().random()", "secrets.randbelow(1000)", "numpy.random.random()"]
DRAWS += ["numpy.random.default_rng().random()", "random.sample(range(99), 3)", "uuid.uuid4().hex", "os.urandom(4)"]
DRAWS += ["random.Random().random()", "(random.seed(), random.random())", "random.choice([random.Random()]).random()"]
DRAWS += ["[*{'one', 'two', 'three', 'four'}]"]


@pytest.mark.parametrize("draw", DRAWS)
def test_tests_and_programs_draw_the_same_numbers_each_time(sandbox, draw):
    """A function that returns what the tests have drawn the first time is right the second time."""
    imports = "import numpy, os, random, secrets, uuid\n"
    drawn = sandbox.run(f"{imports}print({draw})", b"").output.decode().strip()
    for _ in range(2):
        verdict = sandbox.judge("def f(x): return x", f"{imports}assert str(f({draw})) == {drawn!r}", "f")
        assert verdict == Assertions(1, 1)


def test_one_assertion_that_does_not_hold_is_enough_where_all_have_to(sandbox):
    found = sandbox.judge("def f(x): return x", "assert f(1) == 2\nassert f(1) == 1", "f", first=True)
    assert found == Assertions(0, 1)


@pytest.mark.parametrize("verdict", ["", "[5, 3, 0]", "[-1, 3, 0]", "[1e9, 1e9, 0]", "3", "[[[", "[" * 9999])
def test_tests_that_write_a_verdict_of_their_own_are_worth_nothing_if_it_is_none(sandbox, verdict):
    tests = f"import os\nos.write(6, {verdict!r}.encode())\nos._exit(0)\nassert f()"
    assert sandbox.judge("def f(): return 1", tests, "f") == Assertions(0, 1)


def test_tests_that_hang_or_a_function_that_hangs_end_at_the_deadline():
    with Sandbox(Limits(seconds=1)) as sandbox:
        assert sandbox.judge("def f(): pass", "while True: assert f() is None", "f").timed_out
        assert sandbox.judge("def f():\n    while True: pass", "assert f() is None", "f").timed_out


# Calls that depend on their arguments, and the names of those that are called otherwise here.
CHECKED = dict.fromkeys(("CLONE", "CLONE3", "OPENAT", "IOCTL", "FCNTL", "TGKILL", "GETPGID", "GETSID"), "")
CHECKED |= dict.fromkeys(("CLOCK_GETTIME", "CLOCK_GETRES", "CLOCK_NANOSLEEP"), "")
CHECKED |= {"PRLIMIT": "prlimit64", "GETAFFINITY": "sched_getaffinity"}


def verdict_of(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """Run a filter as the kernel does."""
    data = struct.pack("iIQ6Q", number, syscalls.ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments)))
    program, place, value = list(struct.iter_unpack("HBBI", code)), 0, 0
    while True:
        operation, yes, no, constant = program[place]
        if operation == syscalls.RETURN:
            return constant
        if operation == syscalls.LOAD:
            value = struct.unpack_from("I", data, constant)[0]
        elif operation == syscalls.AND:
            value &= constant
        place += 1 + ((yes if value == constant else no) if operation == syscalls.EQUAL else 0)


@pytest.mark.parametrize("machine", syscalls.ARCHITECTURES)
def test_the_filter_allows_what_is_listed_and_nothing_else(machine):
    column = list(syscalls.ARCHITECTURES).index(machine)
    code = syscalls.of_process(syscalls.assemble(machine, threads=True, commands=False), 77)
    kinds = [calls for kind, calls in syscalls.CALLS.items() if kind != syscalls.FOR_COMMANDS]
    plain = {pair[column] for calls in kinds for pair in calls.values()} - {None}
    checked = {getattr(syscalls, name)[column] for name in CHECKED}
    for number in {*range(600), 1 << 30} - checked:
        assert (verdict_of(code, machine, number) == syscalls.ALLOW) is (number in plain)
    of_a_process = (syscalls.PRLIMIT, syscalls.GETPGID, syscalls.GETSID, syscalls.GETAFFINITY)
    allowed = [(syscalls.OPENAT, (0, 0, flags)) for flags in (0, os.O_WRONLY | os.O_TRUNC)]
    allowed += [(syscalls.IOCTL, (0, 0x5401)), (syscalls.TGKILL, (77, 78)), *((pair, (0,)) for pair in of_a_process)]
    allowed += [(syscalls.CLOCK_GETTIME, (3,)), (syscalls.CLONE, (syscalls.CLONE_THREAD,))]
    refused = [(syscalls.OPENAT, (0, 0, os.O_RDONLY | os.O_TRUNC)), (syscalls.TGKILL, (76, 76))]
    refused += [(syscalls.IOCTL, (0, 0x5412)), *((pair, (76,)) for pair in of_a_process)]  # types into the terminal
    refused += [(syscalls.CLOCK_GETTIME, ((~76 << 3 | 2) & 0xFFFFFFFF,))]
    refused += [(syscalls.CLONE, (flags,)) for flags in (17, syscalls.CLONE_THREAD | 0x10000000)]
    for pair, arguments in (*allowed, *refused):
        is_allowed = verdict_of(code, machine, pair[column], *arguments) == syscalls.ALLOW
        assert is_allowed is ((pair, arguments) in allowed)


@pytest.mark.parametrize("machine, header", [("x86_64", "asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")])
def test_the_numbers_are_those_of_the_kernel(machine, header):
    found = [*Path("/usr/include").glob(header), *Path("/usr/include").glob(f"{platform.machine()}-linux-gnu/{header}")]
    if not found:
        pytest.skip(f"the headers of the kernel, {header}, are not here")
    text = found[0].read_text()
    numbers = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}
    pairs = {name: pair for calls in syscalls.CALLS.values() for name, pair in calls.items()}
    pairs |= {name or constant.lower(): getattr(syscalls, constant) for constant, name in CHECKED.items()}
    column = list(syscalls.ARCHITECTURES).index(machine)
    listed = {{"newfstatat": "fstatat"}.get(name, name) if column else name: of[column] for name, of in pairs.items()}
    known = {name: number for name, number in listed.items() if name in numbers and number is not None}
    assert known == {name: numbers[name] for name in known}
    assert len(known) > 90
