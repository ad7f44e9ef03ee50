"""Threads that nobody waits for at the end of the program. Those of a ThreadPoolExecutor are joined there, so Ctrl-C
would last until a server that is silent has used up its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def begin(work: Callable[[], T]) -> Future[T]:
    """Do it beside the caller."""
    future: Future[T] = Future()
    Thread(target=_finish, args=(work, future), daemon=True).start()
    return future


def each(work: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """The results with their places, as they are there. What has not begun when the caller stops never begins."""
    waiting, done = deque(enumerate(work)), SimpleQueue[tuple[int, Future[T]]]()

    def toil() -> None:
        while waiting:
            try:
                index, one = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            future: Future[T] = Future()
            _finish(one, future)
            done.put((index, future))

    for _ in range(min(at_once, len(work))):
        Thread(target=toil, daemon=True).start()
    try:
        for _ in work:
            index, future = done.get()
            yield index, future.result()
    finally:
        waiting.clear()


def _finish(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001  it is the caller's
        future.set_exception(error)
