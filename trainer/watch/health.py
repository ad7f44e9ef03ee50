"""What the rules look at beside the metrics: gradients that are not finite, and an adapter that does not move."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.machine import disk
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import TrainingRow


class Health:
    """Measures the updates of a run step by step, and saves the batches of those that were skipped."""

    def __init__(self, folder: Path, policy: Policy, fresh: bool) -> None:
        self.folder = folder
        self.policy = policy
        # In a resumed run the learning rate may rightly have fallen below what bf16 can show.
        self.before_first_update = policy.fingerprint() if fresh else None
        self.bad_updates = 0

    def of(self, step: int, updates: Sequence[Any], rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Return how many updates in a row were skipped, how many may be, and whether the first one changed nothing.
        There are no updates in a step whose groups are all dead."""
        for update in updates:
            self.bad_updates = self.bad_updates + 1 if update.skipped else 0
        if any(update.skipped for update in updates):
            path = self.folder / f"bad_update_step_{step:06d}_rank_{distributed.rank()}.json"
            disk.replace(path, json.dumps([asdict(row) for row in rows]).encode())
        found: dict[str, float] = {"bad_updates": self.bad_updates}
        found["bad_updates_allowed"] = self.policy.bad_updates_allowed
        has_moved = any(not update.skipped and update.grad_norm > 0 for update in updates)
        if has_moved and self.before_first_update is not None:
            found["unchanged"] = self.policy.fingerprint() == self.before_first_update
            self.before_first_update = None
        return found
