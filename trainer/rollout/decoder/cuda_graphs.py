"""A decode step on a CUDA device: captured as a graph for each of a few sizes, then replayed without Python."""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch

from trainer.machine.out_of_memory import is_out_of_memory
from trainer.rollout.limits import Say

Step = Callable[[int, int], None]

WIDTHS = 256  # the attention width of a captured step is a multiple of this number


class DecodeStep:
    """Calls `step(rows, width)`. Sizes may be rounded up, because rows beyond the active ones are frozen. The step, a
    method of the batch that owns this object, is not stored: such a reference cycle would keep the memory of the batch
    until Python's garbage collector runs."""

    def __init__(self, device: torch.device, say: Say) -> None:
        self.depends_on: tuple[Any, ...] = ()  # values fixed in a captured step; the addresses of the weights are last
        self._say = say
        self._captures = device.type == "cuda"
        self._seen: set[tuple[Any, ...]] = set()
        self._graphs: dict[tuple[Any, ...], torch.cuda.CUDAGraph] = {}

    def __call__(self, step: Step, rows: int, most_rows: int, width: int, most_places: int) -> None:
        if not self._captures:
            return step(rows, width)
        rows, width = rounded(rows, most_rows, width, most_places)
        key = (rows, width, *self.depends_on)
        if key not in self._graphs and key in self._seen:
            self._capture(step, key, rows, width)
        if key in self._graphs:
            return self._graphs[key].replay()
        self._seen.add(key)  # the first step of a size is not captured, because libraries allocate workspaces in it
        return step(rows, width)

    def _capture(self, step: Step, key: tuple[Any, ...], rows: int, width: int) -> None:
        # drop graphs whose weights have moved; a memory pool is freed with its last graph
        self._graphs = {old: graph for old, graph in self._graphs.items() if old[-1] == key[-1]}
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step(rows, width)
            self._graphs[key] = graph
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._captures = False
            self._say(f"rollout: the decode step cannot be captured as a CUDA graph ({error}); decoding without one.")


def rounded(rows: int, most_rows: int, width: int, most_places: int) -> tuple[int, int]:
    """Round rows up to a power of two, and the width to a multiple of `WIDTHS`, so that few sizes are captured."""
    return min(most_rows, 1 << (rows - 1).bit_length()), min(most_places, ceil(width / WIDTHS) * WIDTHS)
