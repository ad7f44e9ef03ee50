"""A time limit for code from elsewhere that may not end, such as a chat template."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TEMPLATE_S = 10.0  # for a chat template, which comes with the model and may not end
# What a chat template may raise beside jinja2.TemplateError: it calls methods of Python's values.
OF_A_TEMPLATE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TimeoutError, TypeError, ValueError)


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside of the context when the time is over. Outside of the main thread there is no limit,
    because Python runs signal handlers there only."""
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
