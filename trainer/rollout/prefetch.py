"""rollout, one step ahead: the next answers are sampled in a thread while the policy trains on these."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from trainer.machine import threads
from trainer.records import ScoredGroup
from trainer.watch.tally import Sums

ScoredRollout = tuple[list[ScoredGroup], Sums]  # groups, and what was measured while they were scored


class Ahead:
    """Holds the groups of the next step while they are sampled.

    After a failure they are lost, and the resumed run samples them again. None are under way at a checkpoint that is
    due by the settings, because the loop then does not sample ahead. A run that is told to stop loses them.
    """

    def __init__(self) -> None:
        self._under_way: tuple[int, Future[ScoredRollout]] | None = None

    def begin(self, step: int, roll_out: Callable[[], ScoredRollout]) -> None:
        assert self._under_way is None, "one step ahead, not two"
        self._under_way = step, threads.begin(roll_out)

    def take(self, step: int) -> ScoredRollout | None:
        """Wait for the groups of this step and return them; None if they were not begun."""
        if self._under_way is None:
            return None
        (begun, rollout), self._under_way = self._under_way, None
        assert begun == step, "what was begun is what comes next"
        return rollout.result()

    def close(self) -> None:
        self._under_way = None
