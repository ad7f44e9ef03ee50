"""SIGUSR1, which `#SBATCH --signal=USR1@120` sends before the time limit, and Ctrl-C; see stopping.py. No torch."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trainer.errors import Interrupted

SIGNALLED = "SIGUSR1 was received"
CTRL_C = "Ctrl-C was pressed"
AFTER_THIS_STEP = "octet: stopping after this step; press Ctrl-C again to end at once\n"


@dataclass
class StopSignal:
    """What this process knows about the signals."""

    reason: str = ""  # which of them has arrived
    interrupts_with: str = ""  # message of the error that it raises at once; empty while it waits for the step to end


_stop = StopSignal()


def listen() -> None:
    """Handle the signal. One that the launcher has blocked until now arrives here."""
    signal.signal(signal.SIGUSR1, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def stop_requested() -> str:
    """Return why the run is to stop, "" if it is not."""
    return _stop.reason


@contextmanager
def ctrl_c_waits_for_the_step() -> Iterator[None]:
    """Let the first Ctrl-C stop the run as SIGUSR1 does, and the next one end it at once; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stop.reason = _stop.reason.replace(CTRL_C, "")  # that of an earlier run in this process
    before = signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Let the signal raise Interrupted in the middle of a block whose work can be done again by the next start."""
    _stop.interrupts_with = message
    try:
        _interrupt_if_requested()
        yield
    finally:
        _stop.interrupts_with = ""


def _on_signal(number: int, frame: FrameType | None) -> None:
    _stop.reason = _stop.reason or SIGNALLED
    _interrupt_if_requested()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    if _stop.reason == CTRL_C:
        raise KeyboardInterrupt
    _stop.reason = CTRL_C
    _interrupt_if_requested()
    if os.environ.get("RANK", "0") == "0":
        os.write(2, AFTER_THIS_STEP.encode())  # a print may have been interrupted, and cannot be entered again


def _interrupt_if_requested() -> None:
    if _stop.reason and _stop.interrupts_with:
        message, _stop.interrupts_with = _stop.interrupts_with, ""  # once: a second signal must not break the clean-up
        raise interruption(_stop.reason, message.format(_stop.reason))


def interruption(reason: str, message: str) -> BaseException:
    """Return what ends a run that was told to stop: after Ctrl-C no job script starts it again."""
    return KeyboardInterrupt(message[0].upper() + message[1:]) if reason == CTRL_C else Interrupted(message)
