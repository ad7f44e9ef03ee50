"""The trained part, an adapter or the whole model: how to compute with its base or other earlier values, and how to
write it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.config.settings import Config, Model
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


class Trained(ABC):
    @abstractmethod
    def as_base(self, updates: int) -> AbstractContextManager[None]:
        """Make the model compute as before its first update, inside the context. `updates` have been made since."""

    @abstractmethod
    def write_model(self, folder: Path) -> None:
        """Write the trained part in a format that other programs read."""

    def start(self) -> dict[str, Tensor]:
        """Return the initial values, if a checkpoint has to keep them."""
        return {}

    def restart(self, start: Mapping[str, Tensor]) -> None:
        """Restore the initial values from a checkpoint whose current values have been loaded."""
        assert not start, "start() keeps nothing"


class Adapter(Trained):
    """LoRA or DoRA that starts at zero, so the base is the model with the adapter disabled."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def as_base(self, updates: int) -> AbstractContextManager[None]:
        return self.model.disable_adapter()

    def write_model(self, folder: Path) -> None:
        lora.save_adapter(self.model, folder)


class FurtherAdapter(Adapter):
    """An adapter that an earlier run has trained. The base is the model with its initial values in this run."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.first = Snapshot(value for value in model.parameters() if value.requires_grad)

    def as_base(self, updates: int) -> AbstractContextManager[None]:
        return self.first.swapped_in()

    def start(self) -> dict[str, Tensor]:
        return dict(zip(lora.trainable(self.model), self.first.values, strict=True))

    def restart(self, start: Mapping[str, Tensor]) -> None:
        self.first.take(list(start.values()))


class PrincipalAdapter(FurtherAdapter):
    """PiSSA, whose base is the remainder of the weights plus the adapter's initial values."""

    def write_model(self, folder: Path) -> None:
        lora.save_difference(self.model, self.start(), folder)

    def restart(self, start: Mapping[str, Tensor]) -> None:
        with self.first.swapped_in():
            lora.restore_first_factors(self.model, start)


class WholeModel(Trained):
    """All parameters are trained. The original weights are not kept in memory, but read again when needed."""

    def __init__(self, model: Any, settings: Model, dtype: str) -> None:
        self.model, self.settings, self.dtype = model, settings, dtype

    @contextmanager
    def as_base(self, updates: int) -> Iterator[None]:
        if not updates:
            yield
            return
        original = load_model(self.settings, self.dtype, distributed.device()).to(self.model.dtype)
        with exchanged(list(self.model.parameters()), list(original.parameters())):
            yield

    def write_model(self, folder: Path) -> None:
        self.model.save_pretrained(str(folder))
        disk.follow_umask(*folder.glob("*.safetensors"))
        load_tokenizer(self.settings).save_pretrained(str(folder))


def make_trained(model: Any, config: Config, dtype: str) -> Trained:
    if not config.lora.enabled:
        return WholeModel(model, config.model, dtype)
    if config.lora.start is not None:
        return FurtherAdapter(model)
    return Adapter(model) if config.lora.init == "zero" else PrincipalAdapter(model)
