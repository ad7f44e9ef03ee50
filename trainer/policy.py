"""The interface of the policy for the loop and its parts. `step/engine.py` implements it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from trainer.records import Scores, TrainingBatch, Update


class Policy(Protocol):
    """The model that learns, inside its engine. Every rank calls every method, except `write_model`."""

    is_displaced: bool
    """True while the weights are displaced for a second gradient, whose scores are not logged."""

    bad_updates_allowed: int
    """The number of updates in a row that may be skipped because the gradient is not finite."""

    # one update

    def score(self, batch: TrainingBatch) -> Scores:
        """Return log-probs and entropies that have a gradient."""

    def measure(self, batch: TrainingBatch) -> Scores:
        """Return log-probs and entropies without a gradient."""

    def backward(self, loss: Any) -> None:
        """Add the gradient of a part of the loss to that of the update."""

    def update(self, gradient: Callable[[], None], step: int) -> Update:
        """Let the optimizer take a step with what `gradient` adds, and with the penalty on its norm in the settings."""

    def rehearse(self, gradient: Callable[[], None]) -> None:
        """Do everything that an update does except its step."""

    def start_over(self) -> None:
        """Discard the gradients that have been added since the update began, also those of an interrupted pass."""

    # temporarily other weights

    def as_base(self) -> AbstractContextManager[None]:
        """Compute as the model before the first update."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute as the reference model of the KL."""

    def as_teacher(self) -> AbstractContextManager[None]:
        """Compute with the teacher's adapter, if the teacher shares the base."""

    def refresh_reference(self, step: int) -> None:
        """Make the policy its own reference if `algorithm.kl.refresh` says so at this step."""

    def gathered(self) -> AbstractContextManager[None]:
        """Gather all weights on every rank, for work that differs between ranks, such as sampling, but not training."""

    # a run

    def fingerprint(self) -> float:
        """Return a number that changes with the trained parameters."""

    def release(self) -> None:
        """Free the memory of the model, which cannot be used afterwards."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def write_model(self, folder: Path) -> None:
        """Write the trained adapter or model for other programs, on one rank, while all weights are gathered."""
