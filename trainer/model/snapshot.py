"""Earlier values of the trained parameters, such as a reference for KL, to compute with for a moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


@contextmanager
def exchanged(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters other values inside the context. Afterwards they have the very same tensors as before."""
    own = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, tensor in zip(parameters, own, strict=True):
            parameter.data = tensor


class Snapshot:
    """A copy of the present values. They are swapped in as tensors, because the engine keeps pointers to its own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.values = [parameter.detach().clone() for parameter in self._parameters]

    def swapped_in(self) -> AbstractContextManager[None]:
        """Give the parameters these values inside the context, in which nothing may be updated."""
        return exchanged(self._parameters, self.values)

    def refresh(self) -> None:
        """Replace the values by the present ones."""
        self.take(self._parameters)

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Replace the values, for example by those of a checkpoint."""
        for own, value in zip(self.values, values, strict=True):
            own.copy_(value)
