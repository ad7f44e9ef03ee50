"""The policy, as the loop and its parts see it. `step/engine.py` has the one that is trained."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from trainer.records import Scores, TrainingBatch, Update


class Policy(Protocol):
    """The model that learns, inside its engine. Every rank calls every method, but for `write_model`."""

    is_displaced: bool
    """True while the weights are moved aside for a second gradient: what is scored then is not logged."""

    @property
    def bad_updates_allowed(self) -> int:
        """How many updates in a row may be skipped because the gradient is not finite."""

    # one update

    def score(self, batch: TrainingBatch) -> Scores:
        """Return log-probs and entropies that have a gradient."""

    def measure(self, batch: TrainingBatch) -> Scores:
        """Return log-probs and entropies without a gradient."""

    def backward(self, loss: Any) -> None:
        """Add the gradient of a share of the loss to that of the update."""

    def set_learning_rate(self, step: int) -> None: ...

    def accumulating(self) -> AbstractContextManager[None]:
        """Add up the gradients of every `backward` inside, and reduce them once over the ranks at the end."""

    def accumulate_regularised(self, gradient: Callable[[], None], strength: float) -> dict[str, float]:
        """Add up the gradient with a penalty on its norm; return what was measured on the way."""

    def step(self, measured: dict[str, float]) -> Update:
        """Let the optimizer take a step on what has been added up."""

    def rehearse(self, gradient: Callable[[], None]) -> None:
        """Do everything that an update does except its step."""

    def start_over(self) -> None:
        """Forget the gradients that have been added up since the update began, by a pass that broke off, too."""

    # other weights for a while

    def as_base(self) -> AbstractContextManager[None]:
        """Compute as the model did before the first update."""

    def as_reference(self) -> AbstractContextManager[None]:
        """Compute as the model that the KL is measured against."""

    def as_teacher(self) -> AbstractContextManager[None]:
        """Compute with the teacher's adapter, where it shares the base."""

    def refresh_reference(self, step: int) -> None:
        """Make the policy its own reference if `algorithm.kl.refresh` says so at this step."""

    def gathered(self) -> AbstractContextManager[None]:
        """Have all weights on every rank, for work that differs from rank to rank, such as sampling. Nothing is trained
        inside."""

    # a run

    def fingerprint(self) -> float:
        """Return a number that changes when a trained parameter does."""

    def release(self) -> None:
        """Free the memory of the model. Nothing can be done with it afterwards."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def write_model(self, folder: Path) -> None:
        """Write what was trained for other programs, on one rank, while all weights are there."""
