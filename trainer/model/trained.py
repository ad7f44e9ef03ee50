"""step: what is trained, an adapter or the whole model: where its base is, and how it leaves a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.config.settings import Config, Model
from trainer.model import lora
from trainer.model.load import load_model, load_tokenizer
from trainer.model.snapshot import Snapshot, exchanged
from trainer.ranks import distributed


class Trained(ABC):
    @abstractmethod
    def as_base(self, updates: int) -> AbstractContextManager[None]:
        """The model computes what it did before the first of so many updates."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write it for other programs."""

    def start(self) -> dict[str, Tensor]:
        """What a checkpoint has to keep of the beginning."""
        return {}

    def restart(self, start: Mapping[str, Tensor]) -> None:
        """The same beginning as that of the run whose values are loaded."""
        assert not start, "only a beginning that was kept comes back"


class Adapter(Trained):
    """LoRA and DoRA that started as nothing: the base is the model with the adapter switched off."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @contextmanager
    def as_base(self, updates: int) -> Iterator[None]:
        with self.model.disable_adapter():
            yield

    def export(self, folder: Path) -> None:
        lora.save_adapter(self.model, folder)


class PrincipalAdapter(Trained):
    """PiSSA: the base is the adapter's first values with the rest of the weights."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.first = Snapshot(value for value in model.parameters() if value.requires_grad)

    def as_base(self, updates: int) -> AbstractContextManager[None]:
        return self.first.swapped_in()

    def export(self, folder: Path) -> None:
        lora.save_learned(self.model, self.start(), folder)

    def start(self) -> dict[str, Tensor]:
        return dict(zip(lora.trainable(self.model), self.first.values, strict=True))

    def restart(self, start: Mapping[str, Tensor]) -> None:
        with self.first.swapped_in():
            lora.start_anew(self.model, start)


class WholeModel(Trained):
    """Every parameter is trained. The original weights are read again when they are asked for, and not kept."""

    def __init__(self, model: Any, settings: Model, dtype: str) -> None:
        self.model = model
        self.settings = settings
        self.dtype = dtype

    def as_base(self, updates: int) -> AbstractContextManager[None]:
        return self._read_again() if updates else nullcontext()

    @contextmanager
    def _read_again(self) -> Iterator[None]:
        original = load_model(self.settings, self.dtype, distributed.device()).to(self.model.dtype)
        with exchanged(list(self.model.parameters()), list(original.parameters())):
            yield

    def export(self, folder: Path) -> None:
        self.model.save_pretrained(str(folder))
        load_tokenizer(self.settings).save_pretrained(str(folder))


def make_trained(model: Any, config: Config, dtype: str) -> Trained:
    if not config.lora.enabled:
        return WholeModel(model, config.model, dtype)
    return Adapter(model) if config.lora.init == "zero" else PrincipalAdapter(model)
