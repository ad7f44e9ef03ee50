"""What a checkpoint was made from: the weights of the base model, and the versions of the packages."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Any

import trainer
from trainer.config.settings import Model
from trainer.errors import CheckpointError
from trainer.machine.visible import visible
from trainer.model import hub
from trainer.ranks import distributed

PACKAGES = ("torch", "deepspeed", "transformers", "peft")


class Origin:
    """A part of every checkpoint. To load it is to compare it with what this run is made from."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.weights = hub.fingerprint(model)

    def state(self) -> dict[str, Any]:
        return {"weights": self.weights, "versions": versions()}

    def load(self, state: dict[str, Any]) -> None:
        """Refuse a checkpoint over other weights, and warn of one that other versions have written."""
        if state["weights"] != self.weights and state["weights"] and self.weights:
            raise CheckpointError(
                f"model.name={self.model.name}: its weights are not those that this run began with. Restore them, name "
                "their revision (model.revision), or choose another run.dir."
            )
        others = [f"{name} {had}" for name, had in state["versions"].items() if versions().get(name) != had]
        if others and distributed.is_main():
            text = f"the checkpoint was written with {', '.join(others)}: the run goes on, but not bit for bit"
            print(f"octet: warning: {visible(text)[:500]}", file=sys.stderr, flush=True)


def versions() -> dict[str, str]:
    """Return the versions of Octet and of the packages that it trains with."""
    return {"octet-grpo": trainer.__version__, **{name: version(name) for name in PACKAGES}}
