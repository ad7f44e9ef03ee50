"""The energy that the card of this process has used, as NVML counts it."""

from __future__ import annotations

from ctypes import CDLL, byref, c_ulonglong, c_void_p
from functools import cache

import torch

from trainer.ranks import distributed


def joules() -> float | None:
    """Return the joules since the driver was loaded; None on a CPU, without NVML, or where a card does not count them,
    as a MIG instance and cards before Volta do not."""
    found = _card() if distributed.on_gpu() else None
    millijoules = c_ulonglong()
    if found is None or found[0].nvmlDeviceGetTotalEnergyConsumption(found[1], byref(millijoules)):
        return None
    return millijoules.value / 1000


@cache
def _card() -> tuple[CDLL, c_void_p] | None:
    """Return NVML, and what it calls the card of this process."""
    try:
        nvml = CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    card, name = c_void_p(), f"GPU-{torch.cuda.get_device_properties().uuid}"
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(name.encode(), byref(card)):
        return None
    return nvml, card
