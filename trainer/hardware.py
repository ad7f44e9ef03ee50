"""What this machine has, found without importing torch: the configuration is settled before anything heavy loads."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str
    name: str
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: tuple[Gpu, ...]  # the visible ones
    cores: int

    @property
    def memory_gb(self) -> float:
        """Memory of the smallest card: the one that has to fit."""
        return min((gpu.memory_gb for gpu in self.gpus), default=0.0)

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU found, {self.cores} CPU cores"
        return f"{len(self.gpus)} x {self.gpus[0].name}, {self.memory_gb:.0f} GB"


@dataclass(frozen=True, slots=True)
class CardState:
    """What changes, and what older tools cannot say."""

    used_gb: float
    free_gb: float
    capability: float
    driver: str


def detect() -> Hardware:
    return Hardware(gpus=_visible(_nvidia_gpus()), cores=len(os.sched_getaffinity(0)))


def let_memory_grow() -> None:
    """Before torch is imported: pieces of memory that can grow leave no holes between batches of many lengths."""
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _nvidia_gpus() -> list[Gpu]:
    if shutil.which("nvidia-smi") is None:
        return []
    rows = _ask("index,uuid,name,memory.total")
    return [Gpu(int(index), uuid, name, _gigabytes(mebibytes)) for index, uuid, name, mebibytes in rows]


def states() -> dict[str, CardState]:
    """Of each card by its UUID, as nvidia-smi sees it now; none of those that it cannot tell."""
    if shutil.which("nvidia-smi") is None:
        return {}
    rows = _ask("uuid,memory.used,memory.free,compute_cap,driver_version")
    return {
        uuid: CardState(_gigabytes(used), _gigabytes(free), float(capability), driver)
        for uuid, used, free, capability, driver in rows
        if all(part.replace(".", "").isdigit() for part in (used, free, capability))  # [N/A] on a card in parts
    }


def driver_cuda() -> str | None:
    """The newest CUDA that the driver runs programs of; it stands above the table that nvidia-smi prints."""
    answer = subprocess.run(["nvidia-smi"], capture_output=True, text=True, timeout=30, check=False)
    found = re.search(r"CUDA[ \w]*Version: *([\d.]+)", answer.stdout)
    return found[1] if found else None


def _ask(columns: str) -> list[list[str]]:
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:  # the tool is there, the driver is not: as good as no GPU
        return []
    lines = [line for line in answer.stdout.splitlines() if line.count(",") == columns.count(",")]
    return [[part.strip() for part in line.split(",")] for line in lines]


def _gigabytes(mebibytes: str) -> float:
    return float(mebibytes) * 2**20 / 1e9


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Only the cards that CUDA_VISIBLE_DEVICES leaves, by index or by the beginning of a UUID, as CUDA reads it: the
    first name that is unknown ends the list."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(gpus)
    visible = []
    for name in chosen.split(","):
        known = [gpu for gpu in gpus if name.strip() and (name.strip() == str(gpu.index) or gpu.uuid.startswith(name))]
        if not known:
            break
        visible.append(known[0])
    return tuple(visible)


def available_memory() -> float:
    """Bytes of this machine's memory that programs can still get; infinite where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return float(kibibytes[0]) * 1024 if kibibytes else math.inf
