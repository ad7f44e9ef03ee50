"""Memory in use: what torch has allocated on a GPU, the resident memory of the process on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from trainer.ranks import distributed

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GB = 1e9


class Peak(NamedTuple):
    """The highest use of memory, in bytes: what was allocated, and what torch had reserved. On a CPU both are equal."""

    allocated: int
    reserved: int


def forget_peak() -> None:
    if distributed.on_gpu():
        torch.cuda.reset_peak_memory_stats()
    elif CLEAR_REFS.exists():
        with suppress(OSError):  # a container may forbid it; the peak is then that of the whole run
            CLEAR_REFS.write_text("5")  # resets VmHWM


def peak() -> Peak:
    if distributed.on_gpu():
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Peak(*[_resident("VmHWM")] * 2)


def held() -> int:
    return torch.cuda.memory_allocated() if distributed.on_gpu() else _resident("VmRSS")


def total() -> int:
    if distributed.on_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident(name: str) -> int:
    """Return the resident memory now (VmRSS) or at its peak (VmHWM). psutil does not have the peak."""
    if not STATUS.exists():  # not Linux
        return 0
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def metrics(peaks: Mapping[str, Peak]) -> dict[str, float]:
    """Return the metrics of a step, in GB, from the peak of each of its phases."""
    named = {f"memory/{phase}": peak.allocated / GB for phase, peak in peaks.items()}
    if distributed.on_gpu():
        named |= {f"memory/{phase}_reserved": peak.reserved / GB for phase, peak in peaks.items()}
    return named | {"memory/held": held() / GB}
