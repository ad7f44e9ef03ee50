"""What this machine has, found without importing torch: the configuration is settled before anything heavy loads."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: tuple[tuple[str, float], ...]  # (name, memory in GB) of each visible CUDA device
    cores: int

    @property
    def memory_gb(self) -> float:
        """Memory of the smallest card: the one that has to fit."""
        return min((memory for _, memory in self.gpus), default=0.0)

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU found, {self.cores} CPU cores"
        name, _ = self.gpus[0]
        return f"{len(self.gpus)} x {name}, {self.memory_gb:.0f} GB"


def detect() -> Hardware:
    return Hardware(gpus=_visible(_nvidia_gpus()), cores=len(os.sched_getaffinity(0)))


def _nvidia_gpus() -> list[tuple[str, float]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:  # the tool is there, the driver is not: as good as no GPU
        return []
    rows = (line.rsplit(",", 1) for line in answer.stdout.splitlines() if "," in line)
    return [(name.strip(), float(mebibytes) * 2**20 / 1e9) for name, mebibytes in rows]


def _visible(gpus: list[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Only the cards that CUDA_VISIBLE_DEVICES leaves; names other than numbers (MIG, UUID) count as the first card."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not gpus:
        return tuple(gpus)
    names = [name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1")]
    numbers = [int(name) if name.isdigit() else 0 for name in names]
    return tuple(gpus[number] for number in numbers if number < len(gpus))
