"""loss: how far the policy has moved from a reference, estimated from the tokens that were sampled (Schulman 2020).

With d = log pi - log pi_ref of a sampled token:

    k1   d                   unbiased, can be negative; for the reward: in a loss its gradient is zero on average
    k2   d^2 / 2             its gradient is that of the true KL, on policy
    k3   exp(-d) + d - 1     unbiased, never negative, little noise; its gradient is that of the KL from pi_ref to pi

`objectives.py` adds it to the loss, or `step/update.py` takes it off the rewards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.config.settings import Kl

if TYPE_CHECKING:
    from torch import Tensor

ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda difference: difference,
    "k2": lambda difference: difference.square() / 2,
    "k3": lambda difference: (-difference).expm1() + difference,
}


class Coefficient:
    """The price of a unit of KL, which is fixed or steered towards a target (Ziegler et al. 2019)."""

    GAIN = 0.1
    LARGEST_ERROR = 0.2  # so a step changes the coefficient by 2 % at most

    def __init__(self, settings: Kl) -> None:
        self.target = settings.target
        self.value = settings.coef

    def observe(self, measured: float) -> None:
        """Adapt the coefficient to the mean KL per token of the step that has ended."""
        if self.target is not None:
            error = measured / self.target - 1
            self.value *= 1 + self.GAIN * max(-self.LARGEST_ERROR, min(self.LARGEST_ERROR, error))

    def state(self) -> dict[str, Any]:
        return {"kl_coef": self.value}

    def load(self, state: dict[str, Any]) -> None:
        self.value = float(state["kl_coef"])
