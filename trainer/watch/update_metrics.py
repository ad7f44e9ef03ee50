"""Metrics of the updates of a step, and measurements that show whether the run is healthy."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from trainer.machine import disk
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import TrainingRow, Update


def metrics_of_updates(updates: Sequence[Update]) -> dict[str, float]:
    """Return means over the updates of a step that were not skipped, and the last learning rate."""
    done = [update for update in updates if not update.skipped]
    metrics = {"lr": updates[-1].lr, "skipped": float(len(updates) - len(done))} if updates else {}
    if done:
        metrics["grad_norm"] = fmean(update.grad_norm for update in done)
        names = set.intersection(*(set(update.measured) for update in done))
        metrics |= {name: fmean(update.measured[name] for update in done) for name in sorted(names)}
    return metrics


class Health:
    """Measures the updates of a run step by step, and saves the batches of skipped updates."""

    def __init__(self, folder: Path, policy: Policy, fresh: bool) -> None:
        self.folder = folder
        self.policy = policy
        # In a resumed run, the learning rate may be so small that rounding to bf16 hides an update.
        self.before_first_update = policy.fingerprint() if fresh else None
        self.bad_updates = 0

    def of(self, step: int, updates: Sequence[Update], rows: Sequence[TrainingRow]) -> dict[str, float]:
        """Return how many updates in a row were skipped, how many may be, and whether the first one changed nothing."""
        for update in updates:
            self.bad_updates = self.bad_updates + 1 if update.skipped else 0
        if any(update.skipped for update in updates):
            path = self.folder / f"bad_update_step_{step:06d}_rank_{distributed.rank()}.json"
            disk.replace(path, json.dumps([asdict(row) for row in rows]).encode())
        metrics: dict[str, float] = {"bad_updates": self.bad_updates}
        metrics["bad_updates_allowed"] = self.policy.bad_updates_allowed
        has_moved = any(not update.skipped and update.grad_norm > 0 for update in updates)
        if has_moved and self.before_first_update is not None:
            metrics["unchanged"] = self.policy.fingerprint() == self.before_first_update
            self.before_first_update = None
        return metrics
