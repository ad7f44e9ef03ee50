"""How much memory is used: on a card as its allocator counts it, on a CPU what the process has resident."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.ranks import distributed

STATUS, FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GB = 1e9
STEPS = 50  # over which a creep is looked for
CREEP = 0.01  # of all memory in so many steps: what is left lasts a night at most


class Peak(NamedTuple):
    """In bytes. What is reserved is allocated, or waits in the allocator; on a CPU there is no difference."""

    allocated: int
    reserved: int


def forget_peak() -> None:
    if distributed.on_gpu():
        torch.cuda.reset_peak_memory_stats()
    elif FORGET.exists():
        with suppress(OSError):  # a container may forbid it: then the peak is that of the whole run
            FORGET.write_text("5")  # the highest resident size


def peak() -> Peak:
    if distributed.on_gpu():
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Peak(*[_of_process("VmHWM")] * 2)


def held() -> int:
    return torch.cuda.memory_allocated() if distributed.on_gpu() else _of_process("VmRSS")


def total() -> int:
    if distributed.on_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_process(name: str) -> int:
    if not STATUS.exists():  # not Linux
        return 0
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def metrics(peaks: Mapping[str, Peak]) -> dict[str, float]:
    """In GB, of each phase of a step."""
    named = {f"memory/{phase}": peak.allocated / GB for phase, peak in peaks.items()}
    if distributed.on_gpu():
        named |= {f"memory/{phase}_reserved": peak.reserved / GB for phase, peak in peaks.items()}
    return named | {"memory/held": held() / GB}


class Creep:
    """What is held at the end of a step must not rise with the steps: the run would die of it hours later."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held: deque[int] = deque(maxlen=STEPS)
        self._has_said = False

    def seen(self, step: int, held: int) -> str | None:
        """What to tell the user, once."""
        self._held.append(held)
        if self._has_said or len(self._held) < STEPS:
            return None
        fifths = [list(self._held)[start : start + STEPS // 5] for start in range(0, STEPS, STEPS // 5)]
        rises = all(min(later) > max(before) for before, later in pairwise(fifths))
        risen = min(fifths[-1]) - max(fifths[0])
        if not rises or risen < CREEP * self._total:
            return None
        self._has_said = True
        return (
            f"step {step}: memory that is held between steps rose by {risen / GB:.2f} GB in {STEPS} steps and goes on "
            f"rising ({held / GB:.2f} of {self._total / GB:.1f} GB). Something keeps what it should let go of: a "
            "function of reward.custom, or a bug of Octet. Save often (run.save_every); the run can be resumed."
        )
