"""The seconds, the memory and the energy that each phase of a step takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from trainer.watch import energy, memory_use


class Phases:
    """Measures the seconds of each phase of a step, the most memory in use at once, and the joules of the card."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, memory_use.Peak] = {}
        self.joules: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, used = perf_counter(), energy.joules()
        memory_use.forget_peak()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - began
            self.peaks[name] = memory_use.peak()
            if used is not None and (now := energy.joules()) is not None:
                self.joules[name] += now - used

    def metrics(self) -> dict[str, float]:
        seconds = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        joules = {f"energy/{name}": joules for name, joules in self.joules.items()}
        return seconds | memory_use.metrics(self.peaks) | joules
