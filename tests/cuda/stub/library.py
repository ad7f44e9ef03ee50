"""The functions of the stub's own that Python calls, and its counters."""

import ctypes

NAMES = (
    *("launches", "graph_launches", "captured", "copies", "bytes_to_card", "bytes_to_host", "bytes_within"),
    *("synchronisations", "allocations", "used", "peak"),
)


class Counters(ctypes.Structure):
    """What the card did so far; card.h says what each number counts."""

    _fields_ = [(name, ctypes.c_uint64) for name in NAMES]


# The process has it already: torch is linked against it.
library = ctypes.CDLL("libcudart.so.13")
library.stub_counters.restype = ctypes.POINTER(Counters)
library.stub_capture_of.restype = ctypes.c_uint64
library.stub_capture_of.argtypes = [ctypes.c_void_p]
Replay = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)
Forget = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


def counted() -> dict[str, int]:
    """Return the counters by their names."""
    counters = library.stub_counters().contents
    return {name: getattr(counters, name) for name in NAMES}
