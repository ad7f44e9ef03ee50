"""The seccomp filter of the sandbox: `syscalls.json` lists the system calls that a program may make. All others fail
with EPERM.

A list of allowed calls needs no change when a kernel gets new system calls. The numbers are those of x86-64 and of
64-bit Arm; null marks a call that Arm does not have.
"""

import errno
import json
import struct
from collections.abc import Iterable
from pathlib import Path

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

# Calls for compilers and for programs that start others. What these must not change is mounted read-only.
FOR_COMMANDS = "for commands"
CALLS: dict[str, dict[str, tuple[int, int | None]]] = json.loads(Path(__file__).with_suffix(".json").read_bytes())
# Calls that are allowed with some arguments only.
CLONE, CLONE3, OPENAT, IOCTL, FCNTL = (56, 220), (435, 435), (257, 56), (16, 29), (72, 25)
TGKILL, PRLIMIT, GETPGID, GETSID, GETAFFINITY = (234, 131), (302, 261), (121, 155), (124, 156), (204, 123)
CLOCK_GETTIME, CLOCK_GETRES, CLOCK_NANOSLEEP = (228, 113), (229, 114), (230, 115)

CLONE_THREAD = 0x00010000
CLONE_NEW = 0x7E020080  # every kind of namespace
OF_A_PROCESS = 0x80000000  # the sign bit of a clock id; set for the CPU time of a process or thread
O_ACCMODE, O_TRUNC = 3, 0o1000
TERMINAL_AND_CLOSE_ON_EXEC = (0x5401, 0x5413, 0x5450, 0x5451, 0x541B, 0x5421)  # isatty, window size, FIONREAD, FIONBIO
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which sends signals
DESCRIPTORS = (0, 1, 2, 3, 4, 1030, 1032)

LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
OWN = 0x7FFF1234  # a placeholder for the process id; larger than any real one
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]


def argument(index: int) -> Instruction:
    """Load the low half of an argument. All arguments tested here are 32-bit integers on little-endian machines."""
    return LOAD, 0, 0, 16 + 8 * index


def one_of(index: int, values: Iterable[int]) -> list[Instruction]:
    """Allow a call if its argument is one of the values."""
    tests = [part for value in values for part in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
    return [argument(index), *tests, (RETURN, 0, 0, FAIL | errno.EPERM)]


def masked(index: int, mask: int, value: int, allow: bool = True) -> list[Instruction]:
    """Allow a call if its masked argument has this value, or with `allow=False` if it does not have it."""
    yes, no = (ALLOW, FAIL | errno.EPERM) if allow else (FAIL | errno.EPERM, ALLOW)
    return [argument(index), (AND, 0, 0, mask), (EQUAL, 0, 1, value), (RETURN, 0, 0, yes), (RETURN, 0, 0, no)]


def of_process(code: bytes, pid: int) -> bytes:
    """Return the filter for the process with this id."""
    return code.replace(struct.pack("I", OWN), struct.pack("I", pid))


def assemble(machine: str, threads: bool, commands: bool) -> bytes:
    """Return the filter as BPF. `threads` and `commands` say if a process may start threads and other programs."""
    column = list(ARCHITECTURES).index(machine)
    code: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER)]
    for kind, calls in CALLS.items():
        for numbers in calls.values() if commands or kind != FOR_COMMANDS else ():
            if (number := numbers[column]) is not None:
                code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    checks = {
        # Versions of Landlock without the right TRUNCATE allow a file that is opened for reading to be truncated.
        OPENAT: masked(2, O_TRUNC | O_ACCMODE, O_TRUNC, allow=False),
        IOCTL: one_of(1, TERMINAL_AND_CLOSE_ON_EXEC),
        FCNTL: one_of(1, DESCRIPTORS),
        TGKILL: one_of(0, [OWN]),
        **dict.fromkeys((PRLIMIT, GETPGID, GETSID, GETAFFINITY), one_of(0, [0, OWN])),
        **dict.fromkeys((CLOCK_GETTIME, CLOCK_GETRES, CLOCK_NANOSLEEP), masked(0, OF_A_PROCESS, 0)),
        CLONE3: [(RETURN, 0, 0, FAIL | errno.ENOSYS)],  # its flags are behind a pointer; libc falls back to clone
    }
    if commands:
        checks[CLONE] = masked(0, CLONE_NEW, 0)
    elif threads:
        checks[CLONE] = masked(0, CLONE_NEW | CLONE_THREAD, CLONE_THREAD)
    for numbers, check in checks.items():
        code += [(EQUAL, 0, len(check), numbers[column]), *check]
    code += [(RETURN, 0, 0, FAIL | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
