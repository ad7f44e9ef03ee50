"""rollout, one step ahead: the next answers are sampled in a thread while the policy trains on these."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer.machine import threads
from trainer.records import ScoredGroup
from trainer.reward.scorer import Sums

Rollout = tuple[list[ScoredGroup], Sums]  # with what their rewards took


class Ahead:
    """At most one step is under way. What is under way at a failure is lost, and sampled again by the run that goes on:
    the loop has nothing under way at the saves that it knows of before the step. One that is told to stop loses it."""

    def __init__(self) -> None:
        self._under_way: tuple[int, Future[Rollout]] | None = None

    def begin(self, step: int, roll_out: Callable[[], Rollout]) -> None:
        assert self._under_way is None, "one step ahead, not two"
        self._under_way = step, threads.begin(roll_out)

    def take(self, step: int) -> Rollout | None:
        """Those of this step, if they were begun; waits for them."""
        if self._under_way is None:
            return None
        (begun, rollout), self._under_way = self._under_way, None
        assert begun == step, "what was begun is what comes next"
        return rollout.result()

    def close(self) -> None:
        self._under_way = None
