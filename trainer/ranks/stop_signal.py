"""SIGUSR1, which `#SBATCH --signal=USR1@120` sends before the time limit; see stopping.py. No torch here."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trainer.errors import Interrupted


@dataclass
class StopSignal:
    """What this process knows about the signal."""

    has_arrived: bool = False
    interrupts_with: str = ""  # message of the error that it raises at once; empty while it waits for the step to end


_stop = StopSignal()


def listen() -> None:
    """Handle the signal. One that the launcher has blocked until now arrives here."""
    signal.signal(signal.SIGUSR1, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def is_stop_requested() -> bool:
    return _stop.has_arrived


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
    _stop.has_arrived = True
    _interrupt_if_requested()


def _interrupt_if_requested() -> None:
    if _stop.has_arrived and _stop.interrupts_with:
        message, _stop.interrupts_with = _stop.interrupts_with, ""  # once: a second signal must not break the clean-up
        raise Interrupted(message)
