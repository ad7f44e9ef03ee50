"""A Python on which some system calls fail, as in a container that forbids them or on a kernel without them."""

import platform
import sys
from pathlib import Path

from tests.conftest import program

PYTHON = sys.executable  # before a test puts one of these in its place
NUMBERS = {"UNSHARE": (272, 97), "LANDLOCK_CREATE_RULESET": (444, 444)}
SCRIPT = """#!{python}
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, {number}), (6, 0, 0, 0x00050000 | 1), (6, 0, 0, 0x7FFF0000)]
code = b"".join(struct.pack("HBBI", *one) for one in code)
pointer = ctypes.cast(ctypes.c_char_p(code), ctypes.c_void_p).value
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", 4, pointer), 0, 0) == 0
os.execv("{python}", ["{python}", *sys.argv[1:]])
"""


def python_without(call: str, folder: Path) -> str:
    """Return an executable file that installs a seccomp filter, and goes on as this Python."""
    number = NUMBERS[call][platform.machine() == "aarch64"]
    return str(program(folder / "python", SCRIPT.format(python=PYTHON, number=number)))
