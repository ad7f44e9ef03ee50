"""The seconds and the memory that each phase of a step takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from trainer.watch import memory_use


class Phases:
    """Measures the seconds of each phase of a step, and the most memory that was in use at once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, memory_use.Peak] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = perf_counter()
        memory_use.forget_peak()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - began
            self.peaks[name] = memory_use.peak()

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()} | memory_use.metrics(self.peaks)
