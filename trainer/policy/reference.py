"""step: earlier values of what is trained, to compute with for a moment: the base model, a reference for KL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Snapshot:
    """The values that parameters have now. The engine keeps pointers into their memory, so that is never written to."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._values = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The parameters have these values inside, and their own tensors again outside. Not around an update."""
        own = [parameter.data for parameter in self._parameters]
        for parameter, value in zip(self._parameters, self._values, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, tensor in zip(self._parameters, own, strict=True):
                parameter.data = tensor

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the present values instead."""
        for parameter, value in zip(self._parameters, self._values, strict=True):
            value.copy_(parameter)
