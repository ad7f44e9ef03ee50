"""Confine a process with Landlock, seccomp, namespaces and resource limits. It confines itself, and needs no root."""

import ctypes
import fcntl
import os
import platform
import resource
import select
import signal
import struct
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from trainer.sandbox import syscalls

libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
ended_with_parent = partial(libc.prctl, PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # a `preexec_fn` of subprocess
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF, MOUNT_SETATTR = 444, 445, 446, 442
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID_NODEV = 2 | 4
AT_RECURSIVE, MOUNT_ATTR_RDONLY_NOSUID = 0x8000, 1 | 2
SECCOMP_MODE_FILTER, LANDLOCK_RULE_PATH_BENEATH = 2, 1
NOBODY = 65534
FOLDER = "/dev/shm"  # every Linux has this folder; each program gets its own tmpfs there
FILES = 1000  # the most files in that tmpfs
OPEN_FILES = 64
KEPT = 200  # descriptors from here on stay open until the process is confined

# Rights of Landlock in the order of their bits, and how many of them each version of its interface knows.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}  # REFER, TRUNCATE, IOCTL_DEV
NET_FROM, SCOPE_FROM = 4, 6
TCP, SCOPES = 3, 3  # bind and connect; signals and abstract sockets
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


@dataclass(frozen=True, slots=True)
class Limits:
    """The resources of one program. `processes` includes threads."""

    seconds: float = 5.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    output_kb: int = 256


@dataclass(frozen=True, slots=True)
class Held:
    """The means to confine programs that this machine has. `landlock` is the version of its interface, or 0."""

    landlock: int
    seccomp: bool
    namespaces: bool  # for users, mounts and the network: a program has a private folder and no network
    counted: bool  # its processes and threads are counted apart from those of others, so a program may start some

    @property
    def is_enough(self) -> bool:
        return self.landlock > 0 and self.seccomp

    def __str__(self) -> str:
        parts = {f"Landlock {self.landlock}" if self.landlock else "Landlock": self.landlock > 0}
        parts |= {"seccomp": self.seccomp, "namespaces": self.namespaces, "threads": self.counted}
        has, lacks = (", ".join(name for name in parts if parts[name] is wanted) for wanted in (True, False))
        return f"{has or 'nothing'}{f'; without {lacks}' if lacks else ''}"


def called(result: int) -> int:
    """Return the result of a C function, or raise its error."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Walls:
    """The confinement of programs. The process that starts programs prepares it, and the process of each enters it."""

    def __init__(self, limits: Limits, is_command: bool) -> None:
        """Give up for good the rights that no program needs, and find out what can confine programs here."""
        self.limits, self.is_command = limits, is_command
        self._granted = list(_opened(is_command))
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if os.getuid() == 0:
            _become_nobody(needs_python=not is_command)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # else /proc/self belongs to root, and namespaces cannot be set up
        with suppress(OSError):
            _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel kills programs first
        is_known = platform.machine() in syscalls.ARCHITECTURES
        has_namespaces = _tries(lambda: _own_users(CLONE_NEWNET)) and _tries(lambda: _own_folder(limits.file_mb))
        self.has_own_processes = False
        if has_namespaces:
            _own_users(CLONE_NEWNET)
            self.has_own_processes = is_command and _tries(lambda: _own_users(CLONE_NEWPID))
        self.held = Held(
            landlock=max(0, libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)),
            seccomp=is_known and _tries(lambda: _filter(syscalls.assemble(platform.machine(), False, False))),
            namespaces=has_namespaces,
            counted=os.getuid() != 0 and has_namespaces,
        )
        if self.held.seccomp:
            self._filter = syscalls.assemble(platform.machine(), self.held.counted, self.is_command)

    def enter(self) -> None:
        """Confine this process with everything that the machine has. There is no way back."""
        os.chdir("/")
        if self.held.namespaces:
            _own_folder(self.limits.file_mb)
            os.chdir(FOLDER)
        if self.held.landlock:
            self._landlock()
        _limit(self.limits, self.held.counted)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # a crash must not start the machine's handler of core dumps
        # a header (version 3, this process) and empty sets of capabilities
        libc.capset(struct.pack("II", 0x20080522, 0), bytes(24))
        if self.held.seccomp:
            _filter(syscalls.of_process(self._filter, os.getpid()))

    def _landlock(self) -> None:
        version = self.held.landlock
        every = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
        handled = [every, *([TCP] if version >= NET_FROM else []), *([SCOPES] if version >= SCOPE_FROM else [])]
        attributes = struct.pack(f"{len(handled)}Q", *handled)
        ruleset = called(libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0))
        granted = self._granted
        if self.held.namespaces:
            granted = [*granted, (os.open(FOLDER, os.O_PATH), every if self.is_command else every & ~EXECUTE)]
        for place, rights in granted:
            rule = struct.pack("=Qi", rights, place)
            called(libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0))
            os.close(place)
        called(libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0))
        os.close(ruleset)


def die_with_parent(parent: int) -> None:
    """Make this process end when its parent ends. `parent` is a pidfd of the parent."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if select.select([parent], [], [], 0)[0]:  # the parent has already ended
        os._exit(1)


def in_own_processes() -> None:
    """Continue as the first process of a new PID namespace, which ends with it. The old process waits for its end."""
    _own_users(CLONE_NEWPID)
    waiting = os.pidfd_open(os.getpid())
    if first := os.fork():
        os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
    die_with_parent(waiting)


def _tries(step: Callable[[], object]) -> bool:
    """Return True if a step succeeds in a child process that does nothing else."""
    child = os.fork()
    if child == 0:
        with suppress(OSError):
            step()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _become_nobody(needs_python: bool) -> None:
    """Become another user than root, unless that user cannot read this Python."""
    try:
        os.setgroups([])
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
        if needs_python:
            os.stat(os.__file__)
    except OSError:
        os.seteuid(0)
        os.setegid(0)
        return
    os.seteuid(0)
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


def _own_users(others: int) -> None:
    """Enter a new user namespace with the same user, and the other new namespaces that are given."""
    user, group = os.geteuid(), os.getegid()
    called(libc.unshare(CLONE_NEWUSER | others))
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        _write(f"/proc/self/{name}", text)


def _own_folder(megabytes: int) -> None:
    """Make all mounts read-only for this process, and mount an empty folder in memory that it may write to."""
    _own_users(CLONE_NEWNS)
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY_NOSUID, 0, 0, 0)
    called(libc.syscall(MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes))))
    options = f"size={megabytes}m,nr_inodes={FILES},mode=700".encode()
    called(libc.mount(b"tmpfs", FOLDER.encode(), b"tmpfs", MS_NOSUID_NODEV, options))


def _limit(limits: Limits, counted: bool) -> None:
    sizes = {
        resource.RLIMIT_AS: limits.memory_mb << 20,
        resource.RLIMIT_FSIZE: limits.file_mb << 20,
        resource.RLIMIT_CPU: int(limits.seconds) + 1,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_CORE: 1,  # with 0, a handler of core dumps would still be started
        resource.RLIMIT_MEMLOCK: 0,
    }
    if counted:
        sizes[resource.RLIMIT_NPROC] = limits.processes
    for kind, size in sizes.items():
        _, hard = resource.getrlimit(kind)
        limit = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(kind, (limit, limit))


def _opened(is_command: bool) -> Iterator[tuple[int, int]]:
    """Open what programs may read: Python, shared libraries and, for a command, other programs. Yield descriptors with
    the rights of Landlock."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {"/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo"}
    if is_command:
        folders |= {"/usr", "/bin", "/etc/alternatives"}
    granted = dict.fromkeys(sorted(folders), READ_FILE | READ_DIR | (EXECUTE if is_command else 0))
    granted |= dict.fromkeys(DEVICES, READ_FILE)
    granted["/dev/null"] |= WRITE_FILE
    for path, rights in granted.items():
        with suppress(OSError):  # it does not exist, or it cannot be read anyway
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            yield fcntl.fcntl(place, fcntl.F_DUPFD, KEPT), rights if os.path.isdir(path) else rights & ~READ_DIR


def _filter(code: bytes) -> None:
    pointer = ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p).value
    called(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, struct.pack("HxxxxxxQ", len(code) // 8, pointer), 0, 0))


def _write(path: str, text: str) -> None:
    """Write to a file of /proc in one call, without the layers of `open`, which take a tenth of the time of a fork."""
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
