"""Load and call user code, which may raise anything, print, or try to exit; and limit the time of code that comes with
a model, such as a chat template, which may never return."""

import faulthandler
import importlib.util
import inspect
import io
import os
import resource
import signal
import symtable
import sys
import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from trainer.errors import ConfigError, OctetError
from trainer.machine.safe_text import as_command, without_keys

GRACE_S = 5.0
TEMPLATE_S = 10.0  # time limit of a chat template
# Errors of a chat template in addition to jinja2.TemplateError, because it calls methods of Python objects.
OF_A_TEMPLATE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TimeoutError, TypeError, ValueError)

# Functions that end the process, or harm it later, are refused while user code runs.
REFUSED: dict[ModuleType, tuple[str, ...]] = {os: ("_exit", "abort", "execv", "execve")}
REFUSED |= {signal: ("alarm", "setitimer"), resource: ("setrlimit", "prlimit")}
REFUSED |= {faulthandler: ("dump_traceback_later",)}
_end_later = faulthandler.dump_traceback_later  # the original, which Octet calls while user code runs
# Getters of torch's settings that change results, and their initial values. The setters have "set" for "get".
OF_TORCH: dict[str, str | int] = {"get_default_dtype": "torch.float32", "get_float32_matmul_precision": "highest"}
OF_TORCH |= {"get_num_threads": "", "get_deterministic_debug_mode": 0}
OF_TORCH |= {"_C._get_mkldnn_enabled": "True", "_C._get_cudnn_enabled": "True"}
MODULE = "octet_custom_"  # prefix of the names of user modules

given: dict[str, Callable[..., Any]] = {}  # functions of a Python session, by the setting that names their copy
# Paths of code, and settings such as `reward.judge.url=...`: those of the current command, and those that only the
# folders of runs name, which may be somebody else's, each with the whole setting that names it.
named, of_runs = set[str](), dict[str, str]()


class Call(threading.Thread):
    """A call in a thread that can be abandoned. `error` is the exception of the call, which may be of any class."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        limit = sys.getrecursionlimit()
        try:
            with _unchanged():
                self.result = self.work()
        except BaseException as error:  # noqa: BLE001  user code may raise anything
            self.error = error
        sys.setrecursionlimit(limit)  # in this thread, because another one may be too deep for the limit of the call

    def within(self, seconds: float) -> bool:
        """Start the call and wait for it. Return False if it is still running after `seconds`."""
        # If the call keeps the interpreter's lock, the main thread never wakes up. This alarm needs no lock.
        _end_later(2 * seconds + GRACE_S, exit=True, file=2)
        self.start()
        self.join(seconds)
        faulthandler.cancel_dump_traceback_later()
        return not self.is_alive()


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restore the settings of torch, and raise RuntimeError if one was changed, because other threads may have used it
    meanwhile."""
    process = os.getpid()
    before = {name: attrgetter(name)(torch)() for name in OF_TORCH} if (torch := sys.modules.get("torch")) else {}
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)  # a process that the call has forked would continue as a second trainer
        for name, first in OF_TORCH.items() if (torch := sys.modules.get("torch")) else ():
            now, known = attrgetter(name)(torch)(), before.get(name, first)
            if known != "" and str(now) != str(known):
                value = getattr(torch, str(known).removeprefix("torch."), known)  # "torch.float32" is a dtype
                attrgetter(name.replace("get", "set"))(torch)(value)
                raise RuntimeError(f"torch.{name}() was {known}, and after the call it is {now} for the whole process")


class Prints(io.TextIOBase):
    """Prints to standard error, because standard output is for results. Closing it has no effect."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def close(self) -> None: ...


class Containment:
    """Prevents user code from ending the process, which would look like success, from printing between results, and
    from changing variables and warnings of the process. The last thread that leaves restores everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside: list[threading.Thread] = []
        self._restoring = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._restoring.enter_context(self._restore())
            self._inside.append(threading.current_thread())

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside.remove(threading.current_thread())
            if not self._inside:
                self._restoring.close()

    @contextmanager
    def _restore(self) -> Iterator[None]:
        real = [(module, name, getattr(module, name)) for module, names in REFUSED.items() for name in names]
        streams, filters, path = (sys.stdout, sys.stderr), [*warnings.filters], [*sys.path]
        folder, environment, variables = os.getcwd(), os.environ, os.environ._data.copy()  # type: ignore[attr-defined]  # decodes nothing
        for module, name, function in real:
            setattr(module, name, partial(self._refuse, os.getpid(), f"{module.__name__}.{name}", function))
        sys.stdout = Prints()
        yield
        for module, name, function in real:
            setattr(module, name, function)
        sys.stdout, sys.stderr = streams
        with suppress(OSError):  # the folder may have been deleted
            os.chdir(folder)
        sys.path += [entry for entry in path if entry not in sys.path]
        os.environ = environment  # noqa: B003
        if environment._data != variables:  # type: ignore[attr-defined]
            os.environb.update(variables)
        warnings.filters[:] = [entry for entry in warnings.filters if entry[0] != "error" or entry in filters]  # type: ignore[index]

    def _refuse(self, process: int, name: str, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        main = threading.main_thread()  # while it is outside, its calls are the trainer's
        if os.getpid() != process or (threading.current_thread() is main and main not in self._inside):
            return real(*arguments, **named)
        raise SystemExit(f"it called {name}, which your code may not do")


contained = Containment()  # one for the process, because all threads share what it changes


def find(key: str, setting: str) -> Path:
    """Return the path of the file in a setting such as `my_rewards.py:score`."""
    if setting in given:
        return Path(getattr(getattr(given[setting], "__code__", None), "co_filename", "no file"))
    path = Path(setting.rpartition(":")[0]).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"{key}={setting}", f"there is no file {path}", "Write the path as seen from here")
    return path


def code_in(setting: str) -> str:
    """Return the path of the code in a setting such as `reward.custom=my_rewards.py:score`, or the setting itself."""
    path, _, name = setting.partition("=")[2].rpartition(":")
    return os.path.abspath(os.path.expanduser(path)) if path.endswith(".py") and name.isidentifier() else setting


def must_be_named(setting: str) -> None:
    """Raise ConfigError for code, a command or a server that only the folder of a run names."""
    if (code := code_in(setting)) in of_runs and code not in named:
        reason = "it is from the folder of a run, which somebody else may have made"
        raise ConfigError(setting, reason, f"Read it; the command uses it if it has {as_command([of_runs[code]])}")


def call(what: str, path: Path, work: Callable[[], Any], kind: type[OctetError] = ConfigError) -> Any:
    """Return the result of a call. If it raises, raise an error that begins with `what` and names the line."""
    calling = Call(work)
    with contained:
        calling.run()
    if calling.error is not None:
        raise kind(f"{what}{where(calling.error, path)}.")
    return calling.result


def load(
    key: str, setting: str, kind: type[OctetError] = ConfigError, run: Callable[..., Any] = call
) -> Callable[..., Any]:
    """Import the file in a setting such as `my_rewards.py:score` and return the function."""
    if setting in given:
        return given[setting]
    path, name = find(key, setting), setting.rpartition(":")[2]
    must_be_named(f"{key}={setting}")
    spec = importlib.util.spec_from_file_location(f"{MODULE}{path.stem}_{zlib.crc32(os.fsencode(path)):08x}", path)
    assert spec is not None, "the settings require a .py file"
    assert spec.loader is not None, "a .py file has one"
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # it may import its neighbours
    run(f"{key}={setting}: the file cannot be imported: ", path, partial(spec.loader.exec_module, module), kind)
    function = getattr(module, name, None)
    if not callable(function):
        known = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise kind(f"{key}={setting}: there is no function `{name}` in it. There are: {', '.join(known) or 'none'}.")
    return function


def where(error: BaseException, path: Path) -> str:
    """Describe an exception and the last line of the user's file that was running."""
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001  an exception of user code may raise another one
        text = "its text cannot be read"
    what = f"{type(error).__name__}: {without_keys(text, 500)}".rstrip(": ")
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"SyntaxError: {error.msg} ({path.name}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(path)]
    return f"{what} ({path.name}, line {own[-1].lineno}: `{own[-1].line}`)" if own else what


def names_in(source: str) -> tuple[list[str], list[str]]:
    """Return the global names that a program defines, and those that it reads or declares: `x += 1` reads none."""
    tables = [symtable.symtable(source, "program.py", "exec")]
    for table in tables:
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols() if symbol.is_global()]
    defined = [symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()]
    used = [symbol for symbol in symbols if symbol.is_referenced() or symbol.is_declared_global()]
    return defined, [symbol.get_name() for symbol in used]


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block when the time is over; only in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
