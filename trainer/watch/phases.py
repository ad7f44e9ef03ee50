"""The cost of each phase of a step: seconds, peak memory, and the energy of the card as NVML counts it.

On a GPU, memory means what torch has allocated; on a CPU, the resident memory of the process.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, byref, c_ulonglong, c_void_p
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import torch

from trainer.ranks import distributed

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
GB = 1e9


class Peak(NamedTuple):
    """The peak memory in bytes, allocated and reserved by torch. On a CPU both are the resident memory."""

    allocated: int
    reserved: int


class Phases:
    """Measures the phases of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.peaks: dict[str, Peak] = {}
        self.joules: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began, used = perf_counter(), joules()
        forget_peak()
        try:
            yield
        finally:
            self.seconds[name] += perf_counter() - began
            self.peaks[name] = peak()
            if used is not None and (now := joules()) is not None:
                self.joules[name] += now - used

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step, memory in GB."""
        metrics = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        metrics |= {f"memory/{name}": peak.allocated / GB for name, peak in self.peaks.items()}
        if distributed.on_gpu():
            metrics |= {f"memory/{name}_reserved": peak.reserved / GB for name, peak in self.peaks.items()}
        held = torch.cuda.memory_allocated() if distributed.on_gpu() else _resident("VmRSS")
        metrics["memory/held"] = held / GB
        return metrics | {f"energy/{name}": joules for name, joules in self.joules.items()}


def forget_peak() -> None:
    if distributed.on_gpu():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # forbidden in some containers; the peak is then that of the whole run
            CLEAR_REFS.write_text("5")  # resets VmHWM


def peak() -> Peak:
    if distributed.on_gpu():
        return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
    return Peak(*[_resident("VmHWM")] * 2)


def total_memory() -> int:
    if distributed.on_gpu():
        return torch.cuda.mem_get_info()[1]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _resident(name: str) -> int:
    """Return the current (VmRSS) or peak (VmHWM) resident memory in bytes. psutil does not report the peak."""
    sizes = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(sizes.get(name, sizes["VmRSS"]).split()[0]) * 1024  # gVisor reports no peak


def joules() -> float | None:
    """Return the joules used since the driver was loaded; None on a CPU, without NVML, or if a card counts none."""
    device = _nvml_device() if distributed.on_gpu() else None
    if device is None:
        return None
    nvml, card = device
    millijoules = c_ulonglong()
    failed = nvml.nvmlDeviceGetTotalEnergyConsumption(card, byref(millijoules))
    return None if failed else millijoules.value / 1000


@cache
def _nvml_device() -> tuple[CDLL, c_void_p] | None:
    """Return NVML and its handle of this process's card."""
    try:
        nvml = CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    card, name = c_void_p(), f"GPU-{torch.cuda.get_device_properties().uuid}"
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), byref(card)):
        return None
    return nvml, card
