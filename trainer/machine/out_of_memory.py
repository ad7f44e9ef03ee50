"""What to do when memory runs out."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from trainer.errors import TrainingError

Result = TypeVar("Result")
OUT_OF_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if memory has run out; CUDA and cuBLAS say so only in the text of a RuntimeError."""
    in_words = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return in_words or isinstance(error, torch.OutOfMemoryError | MemoryError)


def until_it_fits(do: Callable[[], Result], make_room: Callable[[], None]) -> Result:
    """Call `do` until it does not run out of memory, and `make_room` in between. Room is made outside of the exception
    handler, whose traceback would keep the tensors alive."""
    while True:
        try:
            return do()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        make_room()
        gc.collect()  # tensors in reference cycles
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
