"""The seccomp filter of the sandbox: a list of the system calls that a program may make. All others fail with EPERM.

A list of what is allowed needs no change when a kernel gets new system calls. The numbers are those of x86-64 and of
64-bit Arm; None stands for a call that Arm does not have.
"""

import errno
import struct
from collections.abc import Iterable

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*

ALLOWED: dict[str, tuple[int, int | None]] = {
    # files that are open, and paths, which Landlock holds in
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67),
    "pwrite64": (18, 68), "close": (3, 57), "close_range": (436, 436), "lseek": (8, 62), "dup": (32, 23),
    "dup2": (33, None), "dup3": (292, 24), "pipe": (22, None), "pipe2": (293, 59), "ftruncate": (77, 46),
    "fsync": (74, 82), "fdatasync": (75, 83), "fstat": (5, 80), "stat": (4, None), "lstat": (6, None),
    "newfstatat": (262, 79), "statx": (332, 291), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, None), "readlinkat": (267, 78), "getcwd": (79, 17),
    "chdir": (80, 49), "getdents64": (217, 61), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None),
    "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "mincore": (27, 232), "membarrier": (324, 283),
    # signals of its own, threads, waiting
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "rt_sigtimedwait": (128, 137), "pause": (34, None), "restart_syscall": (219, 128), "futex": (202, 98),
    "set_robust_list": (273, 99), "set_tid_address": (218, 96), "rseq": (334, 293), "arch_prctl": (158, None),
    "sched_yield": (24, 124), "getcpu": (309, 168), "poll": (7, None),
    "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "exit": (60, 93), "exit_group": (231, 94),
    # clocks, and what a process may know of itself
    "nanosleep": (35, 101), "gettimeofday": (96, 169), "time": (201, None), "getitimer": (36, 102),
    "setitimer": (38, 103), "alarm": (37, None), "times": (100, 153), "getrusage": (98, 165), "getrandom": (318, 278),
    "uname": (63, 160), "sysinfo": (99, 179), "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158),
    "getpgrp": (111, None), "getrlimit": (97, 163), "setrlimit": (160, 164),
}  # fmt: skip
# For reward.code.command: programs that start others, and compilers. What they may not change is mounted read-only.
ALLOWED_FOR_COMMANDS: dict[str, tuple[int, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "wait4": (61, 260), "waitid": (247, 95),
    "open": (2, None), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
}  # fmt: skip
# Calls of which some arguments are allowed.
CLONE, CLONE3, OPENAT, IOCTL, FCNTL = (56, 220), (435, 435), (257, 56), (16, 29), (72, 25)
TGKILL, PRLIMIT, GETPGID, GETSID, GETAFFINITY = (234, 131), (302, 261), (121, 155), (124, 156), (204, 123)
CLOCK_GETTIME, CLOCK_GETRES, CLOCK_NANOSLEEP = (228, 113), (229, 114), (230, 115)

CLONE_THREAD = 0x00010000
CLONE_NEW = 0x7E020080  # every kind of namespace
OF_A_PROCESS = 0x80000000  # the sign of a clock that counts the CPU time of a process or thread, by its number
O_ACCMODE, O_TRUNC = 3, 0o1000
TERMINAL_AND_CLOSE_ON_EXEC = (0x5401, 0x5413, 0x5450, 0x5451, 0x541B, 0x5421)  # isatty, window size, FIONREAD, FIONBIO
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ; not F_SETOWN, which sends signals
DESCRIPTORS = (0, 1, 2, 3, 4, 1030, 1032)

LOAD, EQUAL, AND, RETURN = 0x20, 0x15, 0x54, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
OWN = 0x7FFF1234  # stands for the number of the process, of which the kernel has none as large
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data

Instruction = tuple[int, int, int, int]


def argument(index: int) -> Instruction:
    """Load the low half of an argument. All that are looked at are 32-bit integers, on little-endian machines."""
    return LOAD, 0, 0, 16 + 8 * index


def one_of(index: int, values: Iterable[int]) -> list[Instruction]:
    """Allow a call if its argument is one of the values."""
    tests = [part for value in values for part in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
    return [argument(index), *tests, (RETURN, 0, 0, FAIL | errno.EPERM)]


def masked(index: int, mask: int, value: int, allow: bool = True) -> list[Instruction]:
    """Allow a call if its argument has this value under the mask; with `allow=False`, if it has not."""
    yes, no = (ALLOW, FAIL | errno.EPERM) if allow else (FAIL | errno.EPERM, ALLOW)
    return [argument(index), (AND, 0, 0, mask), (EQUAL, 0, 1, value), (RETURN, 0, 0, yes), (RETURN, 0, 0, no)]


def of_process(code: bytes, pid: int) -> bytes:
    """Return the filter with the number of the process that it is for."""
    return code.replace(struct.pack("I", OWN), struct.pack("I", pid))


def assemble(machine: str, threads: bool, commands: bool) -> bytes:
    """Return the filter as BPF. `threads` and `commands` say what else a process may start."""
    column = list(ARCHITECTURES).index(machine)
    code: list[Instruction] = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, ARCHITECTURES[machine]), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER)]
    for numbers in [*ALLOWED.values(), *(ALLOWED_FOR_COMMANDS.values() if commands else ())]:
        if (number := numbers[column]) is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    checks = {
        # Until Landlock has the right TRUNCATE, it lets a file be truncated that is opened for reading.
        OPENAT: masked(2, O_TRUNC | O_ACCMODE, O_TRUNC, allow=False),
        IOCTL: one_of(1, TERMINAL_AND_CLOSE_ON_EXEC),
        FCNTL: one_of(1, DESCRIPTORS),
        TGKILL: one_of(0, [OWN]),
        **dict.fromkeys((PRLIMIT, GETPGID, GETSID, GETAFFINITY), one_of(0, [0, OWN])),
        **dict.fromkeys((CLOCK_GETTIME, CLOCK_GETRES, CLOCK_NANOSLEEP), masked(0, OF_A_PROCESS, 0)),
        CLONE3: [(RETURN, 0, 0, FAIL | errno.ENOSYS)],  # its flags are behind a pointer; libc goes on with clone
    }
    if commands:
        checks[CLONE] = masked(0, CLONE_NEW, 0)
    elif threads:
        checks[CLONE] = masked(0, CLONE_NEW | CLONE_THREAD, CLONE_THREAD)
    for numbers, check in checks.items():
        code += [(EQUAL, 0, len(check), numbers[column]), *check]
    code += [(RETURN, 0, 0, FAIL | errno.EPERM)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)
