"""Handlers of Ctrl-C and SIGUSR1, which `#SBATCH --signal=USR1@120` sends before the time limit; see stopping.py."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from trainer.errors import Interrupted
from trainer.machine.exits import handling

SIGNALLED = "SIGUSR1 was received"
CTRL_C = "Ctrl-C was pressed"
AFTER_THIS_STEP = "octet: stopping after this step; press Ctrl-C again to end at once\n"


@dataclass
class StopSignal:
    """The signals that this process has received."""

    reason: str = ""  # the signal that has arrived
    interrupts_with: str = ""  # message of the error to raise immediately; "" while the run stops only after a step


received = StopSignal()


def listen() -> None:
    """Handle SIGUSR1, and unblock it. The launcher blocks it, so a signal that was sent earlier arrives here."""
    signal.signal(signal.SIGUSR1, _on_signal)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@contextmanager
def ctrl_c_waits_for_the_step() -> Iterator[None]:
    """Let the first Ctrl-C stop the run after a step, as SIGUSR1 does, and the second one end it immediately."""
    received.reason = received.reason.replace(CTRL_C, "")  # that of an earlier run in this process
    with handling([signal.SIGINT], _on_ctrl_c):
        yield


@contextmanager
def interruptible(message: str) -> Iterator[None]:
    """Let a signal interrupt a block whose work the next start can repeat."""
    received.interrupts_with = message
    try:
        _interrupt_if_requested()
        yield
    finally:
        received.interrupts_with = ""


def _on_signal(number: int, frame: FrameType | None) -> None:
    received.reason = received.reason or SIGNALLED
    _interrupt_if_requested()


def _on_ctrl_c(number: int, frame: FrameType | None) -> None:
    if received.reason == CTRL_C:
        raise KeyboardInterrupt
    received.reason = CTRL_C
    _interrupt_if_requested()
    if os.environ.get("RANK", "0") == "0":
        os.write(2, AFTER_THIS_STEP.encode())  # the signal may have interrupted a print, which is not reentrant


def _interrupt_if_requested() -> None:
    if received.reason and received.interrupts_with:
        message, received.interrupts_with = received.interrupts_with, ""  # no second signal interrupts the clean-up
        raise interruption(received.reason, message.format(received.reason))


def interruption(reason: str, message: str) -> BaseException:
    """Return the exception that ends a run. A job script restarts the run after Interrupted, but not after Ctrl-C."""
    return KeyboardInterrupt(message[0].upper() + message[1:]) if reason == CTRL_C else Interrupted(message)
