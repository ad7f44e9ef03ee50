"""What the attention kernels of a card can do."""

from __future__ import annotations

import torch


def needs_repeated_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if only the slow attention kernel, which keeps all scores, takes fewer heads of keys than of queries:
    on cards before Ampere, and in fp32 on every card."""
    return device.type == "cuda" and (dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0))
