"""A terminal for tests: what is on it after the codes that Octet and rich write, everything above its top included."""

import os
import pty
import re
import subprocess
from collections.abc import Sequence
from typing import IO

CODES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    def __init__(self, width: int = 80) -> None:
        self.width = width
        self.rows: list[str] = [""]
        self.row = self.column = 0

    def feed(self, text: str) -> "Terminal":
        for argument, code, control, printed in CODES.findall(text):
            if code == "J":
                del self.rows[self.row + 1 :]
                self.rows[self.row] = self.rows[self.row][: self.column]
            elif code == "A":
                self.row -= int(argument or 1)
                assert self.row >= 0
            elif control == "\r":
                self.column = 0
            elif control:
                self._down()
                self.column = 0  # as a terminal that is asked to, which it is by default
            for character in printed:
                self._put(character)
        return self

    @property
    def text(self) -> str:
        return "\n".join(row.rstrip() for row in self.rows)

    def _put(self, character: str) -> None:
        if self.column == self.width:
            self._down()
            self.column = 0
        row = self.rows[self.row].ljust(self.column)
        self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
        self.column += 1

    def _down(self) -> None:
        self.row += 1
        self.rows += [""] * (self.row + 1 - len(self.rows))


def on_a_terminal(
    command: Sequence[str], folder: os.PathLike, width: int, height: int, stdin: IO[str] | None = None
) -> tuple[subprocess.Popen, int]:
    """Start a program on a pseudo-terminal, and return it with the other end."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": str(width), "LINES": str(height)}
    process = subprocess.Popen(command, stdin=stdin, stdout=theirs, stderr=theirs, cwd=folder, env=environment)
    os.close(theirs)
    return process, ours


def read(terminal: int) -> bytes:
    """Return what was written next, or nothing when the other end is closed."""
    try:
        return os.read(terminal, 65536)
    except OSError:
        return b""


def shown(command: Sequence[str], folder: os.PathLike, width: int = 80) -> str:
    """Return what a program leaves on a terminal of this width."""
    process, ours = on_a_terminal(command, folder, width, 40)
    said = b"".join(iter(lambda: read(ours), b""))
    os.close(ours)
    process.wait(60)
    return said.decode()
