"""The runs below a folder, whoever started them; the commands started here; and conversations."""

import json
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import compress
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from tempfile import TemporaryFile
from threading import Lock
from typing import Any

import psutil

from trainer.commands.list import runs_in
from trainer.errors import ConfigError
from trainer.machine import disk
from trainer.machine.installed_files import in_a_process, octet_here
from trainer.machine.safe_text import as_command

UPLOADS = "uploads"  # the folder of the tables
LOCKS = Path("/proc/locks")
TAIL = 6000  # bytes of a log
LIVE = ["config.yaml", "metrics.jsonl", "samples.jsonl"]
WATCHED = [*LIVE, *(f"warmup/{name}" for name in LIVE), "eval.json", "verdict.json"]


def shown(words: Sequence[str]) -> str:
    return f"{octet_here()} {as_command(words)}"


class Runs:
    """The runs of a folder by their names. A command started here has its own session and a log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: dict[str, Popen[bytes]] = {}
        self.chats: dict[str, Chat] = {}
        self.starting = Lock()

    def named(self) -> dict[str, Path]:
        """Return the folders of the runs by name. Only these names are accepted, so no name leads elsewhere."""
        return {str(place.relative_to(self.folder)): place for place in runs_in(self.folder)}

    def without_folder(self) -> list[str]:
        """Return the names of commands whose run has no folder, so that only a log is left. Of the logs in this folder,
        only those of commands begin with a command."""
        named, logs = self.named(), sorted(self.folder.glob("*.log"))
        return [log.stem for log in logs if log.stem not in named and not log.is_symlink() and _has_command(log)]

    def place(self, name: object) -> Path:
        if (place := self.named().get(str(name))) is None:
            raise ConfigError(f"run {name!s:.80}", "there is no run of this name", "Choose one under Train")
        return place

    def seen(self, name: str) -> tuple[object, ...]:
        """Return a value that changes whenever there is something new about a run, without reading its files."""
        files = [*(self.folder / name / file for file in WATCHED), self.log(name)]
        states: list[object] = [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
        is_held = disk.is_locked(self.folder / name / ".lock")
        # a run on another machine has stopped when it has not written for some time
        states += [is_held, is_held or (self.folder / name / "verdict.json").is_file() or time.time() // 60]
        chat = self.chats.get(name)
        talk = (chat.asked, len(chat.answers()), chat.failure()) if chat else ()
        return (name, *states, self.status(name), talk)

    def start(self, name: str, words: Sequence[str]) -> None:
        with open(self.log(name), "ab", opener=disk.not_a_link) as log:
            log.write(f"$ {shown(words)}\n".encode())
            log.flush()
            command = in_a_process(words)
            self.started[name] = Popen(command, stdin=DEVNULL, stdout=log, stderr=STDOUT, start_new_session=True)

    def status(self, name: str) -> int | None:
        """Return the exit status of a command started here, or None if it still runs or was started elsewhere."""
        return self.started[name].poll() if name in self.started else None

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        """Return the last part of the output of the command that a page has started last for a run."""
        if not self.log(name).is_file():
            return ""
        with self.log(name).open("rb") as file:
            file.seek(max(0, self.log(name).stat().st_size - TAIL))
            return file.read().decode(errors="replace").rpartition("\n$ ")[2]

    def process(self, name: str) -> int | None:
        """Return the process to stop: that of the run, whoever started it, or the command that is about to start it."""
        process = held().get((self.folder / name).resolve())
        if process is None and name in self.started and self.status(name) is None:
            return self.started[name].pid
        return process

    def stop(self, name: str) -> None:
        """Make a run save and stop. Repeating the signal changes nothing."""
        if (process := self.process(name)) is None:
            raise ConfigError(f"run {name}", "no process of yours on this machine has it", "Stop it where it runs")
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)

    def hang_up(self, name: str) -> None:
        if chat := self.chats.pop(name, None):
            chat.process.terminate()
            chat.process.wait()


def _has_command(log: Path) -> bool:
    with suppress(OSError), log.open("rb") as file:
        return file.read(2) == b"$ "
    return False


def held() -> dict[Path, int]:
    """Return the folders of this user's runs that are in progress on this machine, with their processes."""
    rows = [row.split() for row in LOCKS.read_text().splitlines()] if LOCKS.is_file() else []
    holders: dict[Path, int] = {}
    for process in {int(row[4]) for row in rows if row[1] == "FLOCK" and row[3] == "WRITE"}:
        with suppress(psutil.Error, OSError):
            locks = [file for file in psutil.Process(process).open_files() if Path(file.path).name == ".lock"]
            # a process may look at the lock of one run while it holds that of another
            is_held = [" WRITE " in Path(f"/proc/{process}/fdinfo/{lock.fd}").read_text() for lock in locks]
            holders |= {Path(lock.path).parent: process for lock in compress(locks, is_held)}
    return holders


class Chat:
    """A process of `octet chat --json`. It ends when this server closes its input."""

    def __init__(self, place: Path) -> None:
        self.asked = 0
        self.out, self.errors = TemporaryFile(), TemporaryFile()  # noqa: SIM115  open during the conversation
        command = in_a_process(["chat", str(place), "--json"])
        self.process = Popen(command, stdin=PIPE, stdout=self.out, stderr=self.errors)

    def ask(self, question: str) -> None:
        assert self.process.stdin is not None, "it is a pipe"
        self.asked += 1
        self.process.stdin.write(" ".join(question.split()).encode(errors="replace") + b"\n")
        self.process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Return the questions that are answered so far, with their answers."""
        return [json.loads(line) for line in os.pread(self.out.fileno(), 1 << 24, 0).split(b"\n")[:-1]]

    def failure(self) -> str:
        if self.process.poll() is None:
            return ""
        return os.pread(self.errors.fileno(), TAIL, 0).decode(errors="replace") or "The conversation has ended."
