"""Bytes of the tensors that are alive, and their peak, whatever the code under it does.

Every operation of torch passes through here, those of the backward pass too. A storage counts once, from the operation
that it comes out of until the last tensor on it is gone. What a kernel allocates inside an operation and frees before
its end is not seen.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}
        self._watched: list[Any] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operation(*args, **(kwargs or {}))
        self.watch(found)
        return found

    def watch(self, tensors: Any) -> None:
        """Count those that were made before, too."""
        for tensor in tree_iter(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self._watch(tensor if tensor.is_mkldnn else tensor.untyped_storage())  # oneDNN's layout has no storage
        self.peak = max(self.peak, self.now)

    def forget_the_peak(self) -> None:
        self.peak = self.now

    def _watch(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes if isinstance(storage, torch.Tensor) else storage.nbytes()
        if key not in self._sizes:
            weakref.finalize(storage, self._gone, key)
            self._sizes[key] = 0
        self.now += size - self._sizes[key]  # a storage may be resized
        self._sizes[key] = size

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)
