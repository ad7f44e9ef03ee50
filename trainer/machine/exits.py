"""The end of every command: its message and its exit status. And what a process that was killed could not print."""

import atexit
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from trainer.errors import Interrupted, OctetError
from trainer.machine import disk
from trainer.machine.safe_text import print, without_keys

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SOON_S = 0.05
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
CAUSE = "The likely cause is that the machine or its job ran out of memory: `dmesg` says so"
# How a process has ended that could not print why, by its exit status.
SILENT_ENDS = {128 + number: f"has crashed ({signal.strsignal(number)})" for number in CRASHES}
SILENT_ENDS[128 + signal.SIGKILL] = f"was killed (signal 9). {CAUSE}"
EARLY = "has ended before its last step, with status 0"  # as after os._exit(0) in a user's function
OTHER_LOCALE = "Write them in UTF-8, and set PYTHONUTF8=1"
END = "OCTET_END"  # environment variable with the file that train.py creates if it succeeds


def answering_errors(command: Callable[[], None], debug: bool = False) -> int:
    """Run a command and return its exit status. An error is printed as one message, or raised with `debug`."""
    for name in ("stdout", "stderr"):  # None if the shell has closed it
        setattr(sys, name, getattr(sys, name) or open(os.devnull, "w"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="backslashreplace")  # such a locale lacks some characters
    try:
        return _status(command, debug)
    except BrokenPipeError:  # the reader has finished: `octet plan | head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        try:
            sys.stderr.flush()
            if "RANK" in os.environ:  # of a run
                print("octet: stopped, because nothing reads its output. `--resume` continues.", file=sys.stderr)
        except BrokenPipeError:  # `2>&1 | head`
            os.dup2(nowhere, sys.stderr.fileno())
        return 128 + signal.SIGPIPE


def _status(command: Callable[[], None], debug: bool) -> int:
    try:
        try:
            command()
            sys.stdout.flush()
        finally:  # when a rank has failed, the launcher stops the others, perhaps while they report that failure
            for number in STOPPING:
                if signal.getsignal(number) is _stop:
                    signal.signal(number, signal.SIG_IGN)
    except OctetError as error:
        if debug and not isinstance(error, Interrupted):
            raise
        rank, text = os.environ.get("RANK", "0"), without_keys(str(error))
        if rank == "0":
            _say(f"octet: {text}")
        elif not error.is_of_all and not isinstance(error, Interrupted):  # it may concern only one node
            _say(f"octet: rank {rank}: {text}")
        return error.status
    except OSError as error:
        if debug or not (what := _explained(error)):
            raise
        _say(f"octet: {what}")
        return 2
    except KeyboardInterrupt as interrupt:  # its text, if any, says how to continue
        if os.environ.get("RANK", "0") == "0":
            _say(f"octet: stopped. {interrupt}".rstrip())
        return 130
    return 0


def _explained(error: OSError) -> str:
    """Return the reason of an error of the system and its remedy; "" if they are unknown."""
    if "No usable temporary directory" in str(error):
        return "no temporary file can be written. Make room in /tmp, or set TMPDIR to another folder."
    if error.errno == errno.ENOENT and error.filename is None:
        return "the current folder has been deleted. Change to another one."
    what = disk.failure(error)
    return what and f"{str(error.filename2 or error.filename or 'while writing')[-200:]}: {what}"


def listen() -> None:
    """Let SIGTERM and SIGHUP (unless under `nohup`) stop this process as Ctrl-C does, so that it cleans up."""
    signal.signal(signal.SIGTERM, _stop)
    sys.unraisablehook = _stop_soon
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for signal_number in STOPPING:  # the launcher may send several, which must not disturb the clean-up
        signal.signal(signal_number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _stop_soon(lost: "sys.UnraisableHookArgs") -> None:
    """Stop a moment later if the signal arrived inside a destructor, which loses exceptions."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(lost)
        return
    signal.signal(signal.SIGTERM, _stop)
    threading.Timer(SOON_S, os.kill, (os.getpid(), signal.SIGTERM)).start()


@contextmanager
def finishing() -> Iterator[None]:
    """Delay the signals that stop this process until the block has ended."""
    held: list[int] = []
    heeded = [one for one in (*STOPPING, signal.SIGUSR1) if signal.getsignal(one) is not signal.SIG_IGN]
    try:
        with handling(heeded, lambda number, frame: held.append(number)):
            yield
    finally:
        for received in held:  # the first Ctrl-C may only ask for the end of a step
            signal.raise_signal(received)


@contextmanager
def handling(signals: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals in a block. This does nothing outside the main thread, because only that can handle signals."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals if is_main}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def shell_status(status: int) -> int:
    """Convert the launcher's exit status (-9 or 247 where signal 9 killed its rank) to that of a shell (137)."""
    if status < 0:
        return 128 - status
    return 128 + 256 - status if status > 256 - signal.NSIG else status


def leave(status: int) -> None:
    """Exit at once: Python would delete all objects, which takes two seconds with torch, and gloo may abort."""
    if END in os.environ and not status:
        with suppress(FileNotFoundError):  # after Ctrl-C the launcher may have exited and removed the folder
            Path(os.environ[END]).touch()
    if processes := sys.modules.get("multiprocessing"):  # Python would wait for processes that user code has started
        for child in processes.active_children():
            child.kill()
    if os.environ.get("WORLD_SIZE", "1") == "1":
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def _say(text: str) -> None:
    """Print to standard error; on a terminal, wrap lines between words."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    from trainer.machine.console import Console  # imports rich

    Console(stderr=True).print(text)
