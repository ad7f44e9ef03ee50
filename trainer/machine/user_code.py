"""Load and call code of the user, which may raise anything, print, or try to end the process."""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from trainer.errors import ConfigError, OctetError

GRACE_S = 5.0

given: dict[str, Callable[..., Any]] = {}  # functions of a session in Python, by the setting that names their copy


class Call(threading.Thread):
    """A call in a thread that can be abandoned. It keeps what the call raises, because user code may raise anything."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        limit = sys.getrecursionlimit()
        with self:
            self.result = self.work()
        sys.setrecursionlimit(limit)  # in this thread: another one may be too deep for the limit that the call has set

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.error = error
        return True

    def within(self, seconds: float) -> bool:
        """Start the call and wait for it. Return False if it is still running after `seconds`."""
        # The interpreter's own alarm needs no lock that the call might hold.
        faulthandler.dump_traceback_later(2 * seconds + GRACE_S, exit=True, file=sys.__stderr__ or 2)
        self.start()
        self.join(seconds)
        faulthandler.cancel_dump_traceback_later()
        return not self.is_alive()


class Prints(io.TextIOBase):
    """Standard output for user code, which prints to standard error: results stand on standard output. To close it has
    no effect."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def close(self) -> None: ...


class Containment:
    """Lets user code neither end the process, which would look like success, nor print between results.

    Several threads may be inside at once. The last one that leaves puts everything back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._exit: Callable[[int], NoReturn] = os._exit
        self._stdout = sys.stdout

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._exit, self._stdout = os._exit, sys.stdout
                os._exit, sys.stdout = self._refuse(os.getpid()), Prints()  # type: ignore[assignment]
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                os._exit, sys.stdout = self._exit, self._stdout  # type: ignore[assignment]

    def _refuse(self, own: int) -> Callable[[int], NoReturn]:
        real = self._exit

        def refuse(status: int) -> NoReturn:
            if os.getpid() != own:  # a process that the user code has forked
                real(status)
            raise SystemExit(f"os._exit({status})")

        return refuse


CONTAINMENT = Containment()


def contained() -> Containment:
    """Return what contains user code. There is one for the process, because what it changes belongs to all threads."""
    return CONTAINMENT


def find(key: str, setting: str) -> Path:
    """Return the path of the file in a setting such as `my_rewards.py:score`."""
    if setting in given:
        return Path(getattr(getattr(given[setting], "__code__", None), "co_filename", "no file"))
    path = Path(setting.rpartition(":")[0]).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key}={setting}: there is no file {path}. Write the path as seen from here.")
    return path


def load(key: str, setting: str, kind: type[OctetError] = ConfigError) -> Callable[..., Any]:
    """Import the file in a setting such as `my_rewards.py:score` and return the function."""
    if setting in given:
        return given[setting]
    path, name = find(key, setting), setting.rpartition(":")[2]
    spec = importlib.util.spec_from_file_location(f"octet_custom_{path.stem}", path)
    assert spec is not None, "the settings require a .py file"
    assert spec.loader is not None, "a .py file has one"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import its neighbours
    call(f"{key}={setting}: the file cannot be imported: ", path, partial(spec.loader.exec_module, module), kind)
    function = getattr(module, name, None)
    if not callable(function):
        there = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise kind(f"{key}={setting}: there is no function `{name}` in it. There are: {', '.join(there) or 'none'}.")
    return function


def call(what: str, path: Path, work: Callable[[], Any], kind: type[OctetError] = ConfigError) -> Any:
    """Return what a call returns. Raise an error that begins with `what` and names the line, if it raises."""
    calling = Call(work)
    with contained():
        calling.run()
    if calling.error is not None:
        raise kind(f"{what}{where(calling.error, path)}.")
    return calling.result


def where(error: BaseException, path: Path) -> str:
    """Describe an exception and the last line of the user's file that was running."""
    what = f"{type(error).__name__}: {_text(error)[:500]}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"SyntaxError: {error.msg} ({path.name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    return f"{what} ({path.name}, line {own[-1].lineno}: `{own[-1].line}`)" if own else what


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException:  # noqa: BLE001  user code may raise anything, in its exceptions too
        return "its text cannot be read"
