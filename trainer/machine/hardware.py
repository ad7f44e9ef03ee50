"""What this machine has, found without importing torch: the configuration is settled before anything heavy loads."""

from __future__ import annotations

import os
import re
import shutil
import socket
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


def ranks(machine: Hardware) -> tuple[int, int]:
    """Of the run, and those of them on this machine: as the launcher has said, else one for each card here."""
    world_size = int(os.environ.get("WORLD_SIZE", max(1, len(machine.gpus))))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, max(1, len(machine.gpus)))))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def free_ram(meminfo: Path = Path("/proc/meminfo"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """What programs can still get, swap included, and no more than the limit of a container or a cluster's job."""
    kilobytes = {}
    for line in meminfo.read_text().splitlines():
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    free = (kilobytes["MemAvailable"] + kilobytes.get("SwapFree", 0)) * 1024
    return min([free, *_limits(groups)])


def _limits(groups: Path) -> list[int]:
    """Of this process's control group (version 2) and of those above it: the limit, less what is taken for good."""
    own = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::/")]
    folder, limits = groups / own[0][len("0::/") :] if own else groups, []
    for group in (folder, *folder.parents):
        limit = group / "memory.max"
        if groups in (group, *group.parents) and limit.is_file() and limit.read_text().strip().isdigit():
            taken = int((group / "memory.current").read_text()) - _file_cache(group)
            limits.append(max(0, int(limit.read_text()) - taken))
    return limits


def _file_cache(group: Path) -> int:
    """Read files that are kept only as long as nobody needs the room."""
    rows = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(rows.get("inactive_file", 0)) + int(rows.get("active_file", 0))
