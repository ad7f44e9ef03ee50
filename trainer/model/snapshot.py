"""step: earlier values of what is trained, to compute with for a moment: the base model, a reference for KL."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


@contextmanager
def exchanged(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Parameters with other values on the same device inside; the very same tensors outside."""
    own = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, tensor in zip(parameters, own, strict=True):
            parameter.data = tensor


class Snapshot:
    """The values that parameters have now. The engine keeps pointers into their memory, so that is never written to."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._values = [parameter.detach().clone() for parameter in self._parameters]

    @property
    def values(self) -> list[Tensor]:
        return self._values

    def swapped_in(self) -> AbstractContextManager[None]:
        """The parameters have these values inside, and their own tensors again outside. Not around an update."""
        return exchanged(self._parameters, self._values)

    def refresh(self) -> None:
        """Take the present values instead."""
        self.take(self._parameters)

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Other values instead, such as those of a checkpoint."""
        for own, value in zip(self._values, values, strict=True):
            own.copy_(value)
