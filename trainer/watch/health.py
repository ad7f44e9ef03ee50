"""Warns about, or ends, a run that cannot learn: gradients not finite, adapters that never move, dead groups only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.errors import TrainingError
from trainer.machine import disk
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.records import TrainingRow
from trainer.watch import memory_use

DEAD_STEPS_IN_A_ROW = 50  # steps without a live group on any rank
WHY_VLLM_DIFFERS = (
    "Likely reasons: the temperature is missing from vLLM's log-probs (--logprobs-mode raw_logprobs), vLLM has an "
    "adapter of an earlier step, or another base, precision or quantisation. With rollout.ahead=1 one update is part "
    "of the difference: is algorithm.lr too high?"
)
WHY_OCTET_DIFFERS = (
    "Octet sampled with the weights that it trains, so only rounding should differ. Try model.dtype=fp32, and "
    "rollout.engine=hf, which samples with model.generate."
)


class Health:
    """Watches a run, step by step, and warns about or ends one that cannot be right."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        warn: Callable[[str], None],
        fresh: bool,
        max_difference: float = 1.0,
        uses_vllm: bool = False,
    ) -> None:
        self.folder = folder
        self.policy = policy
        self.warn = warn
        self.leaks = memory_use.LeakDetector(memory_use.total())
        self.max_difference = max_difference
        self.uses_vllm = uses_vllm
        # In a resumed run the learning rate may rightly have fallen below what bf16 can show.
        self.before_first_update = policy.fingerprint() if fresh else None
        self.bad_updates = 0
        self.dead_steps = 0

    def check(self, step: int, updates: Sequence[Any], rows: Sequence[TrainingRow]) -> None:
        """Check the updates of a step. There are none in a step without a live group."""
        if text := self.leaks.seen(step, memory_use.held()):
            self.warn(text)
        self.dead_steps = 0 if updates else self.dead_steps + 1
        for update in updates:
            self.bad_updates = self.bad_updates + 1 if update.skipped else 0
        if any(update.skipped for update in updates):
            path = self.folder / f"bad_update_step_{step:06d}_rank_{distributed.rank()}.json"
            disk.replace(path, json.dumps([asdict(row) for row in rows]).encode())
        if self.dead_steps >= DEAD_STEPS_IN_A_ROW:
            raise TrainingError(
                f"step {step}",
                f"no problem of the last {self.dead_steps} steps had answers to learn from",
                "Read samples.jsonl: are all wrong (easier problems, prompt.style, reward.answer=lenient), all alike "
                "(higher rollout.temperature, larger rollout.group_size), all cut off and masked "
                "(algorithm.truncated=mask: larger rollout.max_new_tokens), or without a reward (a failing judge)?",
            )
        if self.bad_updates >= self.policy.bad_updates_allowed:
            raise TrainingError(
                f"step {step}",
                f"the gradient was not finite {self.bad_updates} times in a row; the batches are in "
                f"{self.folder}/bad_update_*.json",
                "Lower algorithm.lr, or use model.dtype=bf16 or fp32",
            )
        if any(not update.skipped and update.grad_norm > 0 for update in updates):
            self._check_that_it_moved(step)

    def compare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check that the sampler samples from the policy that is trained. Metrics are the same on all ranks."""
        apart = metrics.get("sampler_difference")
        if apart is None:  # nothing was trained on, so nothing was compared
            return
        why, setting = (WHY_VLLM_DIFFERS, "rollout.vllm.max_difference=") if self.uses_vllm else (WHY_OCTET_DIFFERS, "")
        if not apart <= self.max_difference:  # which holds for NaN, too
            raise TrainingError(
                f"step {step}",
                f"the log-probs of sampler and trainer differ by {apart:.2f} in the mean of its tokens, more than "
                f"{setting}{self.max_difference:g}",
                why,
            ).of_all()

    def _check_that_it_moved(self, step: int) -> None:
        """Raise if the first update has changed nothing."""
        if self.before_first_update is not None and self.policy.fingerprint() == self.before_first_update:
            raise TrainingError(
                f"step {step}",
                "the update changed no trainable parameter, so this run would end without learning",
                "Check that lora.targets names layers of this model and that algorithm.lr is not too small",
            )
        self.before_first_update = None
