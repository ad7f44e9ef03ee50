"""Recognise, survive or explain an out-of-memory error."""

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
    """Return True if memory has run out, which CUDA and cuBLAS report only in the text of a RuntimeError."""
    has_text = isinstance(error, RuntimeError) and any(text in str(error) for text in OUT_OF_MEMORY)
    return has_text or isinstance(error, torch.OutOfMemoryError | MemoryError)


def until_it_fits(do: Callable[[], Result], make_room: Callable[[], None]) -> Result:
    """Call `do` until it succeeds, and `make_room` each time that it runs out of memory. Room is made outside the
    exception handler, because the traceback keeps tensors alive."""
    while True:
        try:
            return do()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        make_room()
        gc.collect()  # frees tensors in reference cycles
        torch.cuda.empty_cache()  # frees cached blocks that are too small


@contextmanager
def explained() -> Iterator[None]:
    """Explain an out-of-memory error where nothing can be made smaller, such as while a model loads."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory ({str(error).partition(chr(10))[0]}) where nothing can be made smaller. `octet plan` says "
            "what fits: a smaller or quantised model, a smaller lora.r, or another engine.ds_config. `octet doctor` "
            "says whether another program holds memory."
        ) from error
