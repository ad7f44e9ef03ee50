"""What to do when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from trainer.errors import TrainingError

Result = TypeVar("Result")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for a CUDA out-of-memory error, or the CPU allocator's RuntimeError."""
    in_words = isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    return in_words or isinstance(error, torch.OutOfMemoryError | MemoryError)


def until_it_fits(do: Callable[[], Result], make_room: Callable[[], None]) -> Result:
    """Call `do` until it does not run out of memory, and `make_room` in between.

    Room is made outside of the exception handler, whose traceback would keep the tensors alive.
    """
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
    """Turn an out-of-memory error into a message, where nothing can be made smaller, such as while a model loads."""
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
