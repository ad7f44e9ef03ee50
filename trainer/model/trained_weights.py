"""The trained part, an adapter or the whole model: how to compute with its base or other earlier values, and how to
write it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from trainer.config.settings import Config
from trainer.machine import disk
from trainer.model import lora
from trainer.model.load import load_model, load_tokenizer
from trainer.ranks import distributed


@contextmanager
def exchanged(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give parameters other values inside the context, and then the same tensors as before."""
    before = [parameter.data for parameter in parameters]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value
    try:
        yield
    finally:
        for parameter, tensor in zip(parameters, before, strict=True):
            parameter.data = tensor


class Snapshot:
    """A copy of the current values, swapped in as whole tensors, because the engine keeps pointers to its own ones."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self.values = [parameter.detach().clone() for parameter in self._parameters]

    def swapped_in(self) -> AbstractContextManager[None]:
        """Give the parameters these values inside the context, in which nothing may be updated."""
        return exchanged(self._parameters, self.values)

    @torch.no_grad()
    def take(self, values: Sequence[Tensor]) -> None:
        """Replace the stored values, by the current ones or those of a checkpoint."""
        for old, value in zip(self.values, values, strict=True):
            old.copy_(value)


class Trained:
    """An adapter or a whole model. The base of an adapter is the model without it, except for PiSSA and for an adapter
    that an earlier run has trained, whose initial values are kept."""

    def __init__(self, model: Any, config: Config, dtype: str) -> None:
        self.model, self.config, self.dtype = model, config, dtype
        self.is_principal = config.lora.enabled and config.lora.init != "zero"  # PiSSA
        keeps_first = self.is_principal or (config.lora.enabled and config.lora.start is not None)
        trainable = (value for value in model.parameters() if value.requires_grad)
        self.first = Snapshot(trainable) if keeps_first else None

    def as_base(self, updates: int) -> AbstractContextManager[None]:
        """Make the model compute as before its first update, inside the context. `updates` have been made since."""
        if self.first:
            return self.first.swapped_in()
        if self.config.lora.enabled:
            return cast("AbstractContextManager[None]", self.model.disable_adapter())
        if not updates:
            return nullcontext()
        # the original weights are not kept in memory
        original = load_model(self.config.model, self.dtype, distributed.device()).to(self.model.dtype)
        return exchanged(list(self.model.parameters()), list(original.parameters()))

    def write_model(self, folder: Path) -> None:
        """Write the trained part in a format that other programs read."""
        if self.is_principal:
            lora.save_difference(self.model, self.start(), folder)
        elif self.config.lora.enabled:
            lora.save_adapter(self.model, folder)
        else:
            self.model.save_pretrained(str(folder))
            disk.follow_umask(*folder.glob("*.safetensors"))
            load_tokenizer(self.config.model).save_pretrained(str(folder))

    def start(self) -> dict[str, Tensor]:
        """Return the initial values, if a checkpoint has to keep them."""
        return dict(zip(lora.trainable(self.model), self.first.values, strict=True)) if self.first else {}

    def restart(self, start: Mapping[str, Tensor]) -> None:
        """Restore the initial values from a checkpoint whose current values have been loaded."""
        assert self.first, "start() keeps nothing"
        if self.is_principal:
            with self.first.swapped_in():
                lora.restore_first_factors(self.model, start)
        else:
            self.first.take(list(start.values()))
