"""rollout, one step ahead: the next answers are sampled in a thread while the policy trains on these."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer import background
from trainer.types import ScoredGroup


class Ahead:
    """At most one step is under way. What is under way at a failure is lost, and sampled again by the run that goes on:
    the loop has nothing under way when it saves."""

    def __init__(self) -> None:
        self._under_way: tuple[int, Future[list[ScoredGroup]]] | None = None

    def begin(self, step: int, roll_out: Callable[[], list[ScoredGroup]]) -> None:
        assert self._under_way is None, "one step ahead, not two"
        self._under_way = step, background.begin(roll_out)

    def take(self, step: int) -> list[ScoredGroup] | None:
        """The groups of this step, if they were begun; waits for them."""
        if self._under_way is None:
            return None
        (begun, groups), self._under_way = self._under_way, None
        assert begun == step, "what was begun is what comes next"
        return groups.result()

    def close(self) -> None:
        self._under_way = None
