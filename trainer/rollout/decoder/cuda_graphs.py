"""A decode step on a CUDA device: captured as a graph for each of a few sizes, then replayed without Python."""

from collections.abc import Callable
from typing import Any

import torch

from trainer.machine.out_of_memory import is_out_of_memory
from trainer.rollout.limits import Say

Step = Callable[[int, int], None]

WIDTHS = 256  # the attention width of a captured step is a multiple of this


class DecodeStep:
    """Calls `step(rows, width)`. Sizes may be rounded up, because rows beyond the active ones are frozen. The step is
    not stored: it belongs to the batch that this object belongs to, and the cycle would keep the memory of the batch
    until Python's cyclic garbage collector runs."""

    def __init__(self, device: torch.device, say: Say) -> None:
        self.depends_on: tuple[Any, ...] = ()  # what a captured step has read; the address of the weights comes last
        self._say = say
        self._captures = device.type == "cuda"
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}

    @property
    def captured(self) -> int:
        return len(self._graphs)

    def __call__(self, step: Step, rows: int, most_rows: int, width: int, most_places: int) -> None:
        if not self._captures:
            return step(rows, width)
        rows, width = rounded(rows, most_rows, width, most_places)
        key = (rows, width, *self.depends_on)
        if key not in self._graphs and key in self._seen:
            self._capture(step, key, rows, width)
        if key in self._graphs:
            return self._graphs[key].replay()
        self._seen.add(key)  # the first step of a size is not captured: libraries allocate their workspaces in it
        return step(rows, width)

    def _capture(self, step: Step, key: tuple[Any, ...], rows: int, width: int) -> None:
        *_, addresses = key
        # graphs of weights that have moved since are useless, and a pool of memory ends with the last graph in it
        self._graphs = {old: graph for old, graph in self._graphs.items() if old[-1] == addresses}
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step(rows, width)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._captures = False
            self._say(f"rollout: the decode step cannot be captured as a CUDA graph ({error}); going on without.")
            return
        self._graphs[key] = graph


def rounded(rows: int, most_rows: int, width: int, most_places: int) -> tuple[int, int]:
    """Round rows up to a power of two and the width to a multiple of `WIDTHS`: few sizes, little waste."""
    return min(most_rows, 1 << (rows - 1).bit_length()), min(most_places, rounded_up(width, WIDTHS))


def rounded_up(number: int, step: int) -> int:
    return -(-number // step) * step
