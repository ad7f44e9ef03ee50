"""Run functions in daemon threads, which Python does not join when it exits. It joins those of a ThreadPoolExecutor, so
Ctrl-C would take effect only after the timeout of a server that does not answer."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread."""
    future: Future[T] = Future()
    Thread(target=_run, args=(work, future), daemon=True).start()
    return future


def each(work: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """Call the functions, `at_once` at a time, and yield (index, result) as they finish, until the caller stops."""
    waiting, done = deque(enumerate(work)), SimpleQueue[tuple[int, Future[T]]]()

    def worker() -> None:
        with suppress(IndexError):  # raised when no function is waiting
            while True:
                index, function = waiting.popleft()
                future: Future[T] = Future()
                _run(function, future)
                done.put((index, future))

    for _ in range(min(at_once, len(work))):
        Thread(target=worker, daemon=True).start()
    try:
        for _ in work:
            index, future = done.get()
            yield index, future.result()
    finally:
        waiting.clear()


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  future.result() raises it in the caller
        future.set_exception(error)
