"""Run functions in daemon threads, which Python does not join when it exits. It joins those of a ThreadPoolExecutor, so
Ctrl-C would take effect only after the timeout of a server that does not answer."""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, as_completed
from contextlib import suppress
from functools import cache
from threading import Lock, Thread
from typing import Any, TypeVar

T = TypeVar("T")


class Workers:
    """Threads that call functions in the order in which they are given, `at_once` at a time."""

    def __init__(self, at_once: int) -> None:
        self._waiting = deque[tuple[Callable[[], Any], Future[Any]]]()
        self._at_once, self._running, self._counting = at_once, 0, Lock()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._counting:
            self._waiting.append((work, future))
            if self._running < self._at_once:
                self._running += 1
                Thread(target=self._work, daemon=True).start()
        return future

    def drop(self) -> None:
        """Leave out the functions that have not begun."""
        with self._counting:
            self._waiting.clear()

    def _work(self) -> None:
        while True:
            with self._counting:
                if not self._waiting:
                    self._running -= 1
                    return
                work, future = self._waiting.popleft()
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001  future.result() raises it in the caller
                future.set_exception(error)


def begin(work: Callable[[], T]) -> Future[T]:
    """Call a function in a new thread."""
    return Workers(1).begin(work)


def each(work: Sequence[Callable[[], T]], at_once: int) -> Iterator[tuple[int, T]]:
    """Call the functions, `at_once` at a time, and yield (index, result) as they finish, until the caller stops."""
    workers = Workers(at_once)
    indices = {workers.begin(function): index for index, function in enumerate(work)}
    try:
        for future in as_completed(indices):
            yield indices[future], future.result()
    finally:
        workers.drop()


def finished(result: Any) -> Any:
    """Return a result, or that of a coroutine, which runs in the one event loop of all environments and tools."""
    return asyncio.run_coroutine_threadsafe(result, _loop()).result() if inspect.iscoroutine(result) else result


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop. There is one, because a connection belongs to the loop in which it was opened."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        while True:
            with suppress(SystemExit, KeyboardInterrupt):  # raised by a coroutine, whose caller gets it too
                loop.run_forever()

    Thread(target=run, daemon=True).start()
    return loop
