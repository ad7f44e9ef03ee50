"""What to do when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from trainer.errors import TrainingError

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """Of a card, or of a CPU, whose allocator says so in words only."""
    in_words = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return in_words or isinstance(error, torch.OutOfMemoryError | MemoryError)


def until_it_fits(do: Callable[[], Result], make_room: Callable[[], None]) -> Result:
    """Room is made outside of the handler: there the traceback would keep the tensors alive."""
    while True:
        try:
            return do()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        make_room()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # pieces that are free, but too small


@contextmanager
def explained() -> Iterator[None]:
    """Where nothing can be made smaller, such as while a model loads, the end is a message and no traceback."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory ({str(error).partition(chr(10))[0]}), where it cannot go on with less. `octet plan` says "
            "what fits: a smaller or quantised model, a smaller lora.r, or another engine.ds_config. `octet doctor` "
            "says whether another program holds memory."
        ) from error
