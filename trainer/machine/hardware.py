"""Detect the hardware of this machine, without importing torch, so that settings are resolved before heavy imports."""

import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from ctypes import CDLL, byref, c_int, c_size_t, c_ubyte, create_string_buffer
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from trainer.errors import ConfigError, counted
from trainer.machine.installed_files import CHECKOUT


@dataclass(frozen=True, slots=True)
class CardState:
    """The use of a card according to nvidia-smi, which reports none for a MIG instance."""

    used_gb: float
    free_gb: float
    capability: float
    driver: str


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    uuid: str  # begins with MIG- for a MIG instance
    name: str
    memory_gb: float
    state: CardState | None = None
    shares_ram: bool = False  # the card has no memory of its own, so `memory_gb` is the machine's RAM


@dataclass(frozen=True, slots=True)
class Hardware:
    gpus: tuple[Gpu, ...]  # the visible ones
    cores: int

    @property
    def memory_gb(self) -> float:
        """Memory of the smallest card, which a run has to fit."""
        return min((gpu.memory_gb for gpu in self.gpus), default=0.0)

    def __str__(self) -> str:
        if not self.gpus:
            return f"no GPU found, {counted(self.cores, 'CPU core')}"
        shared = " of RAM, shared with the CPU" if any(gpu.shares_ram for gpu in self.gpus) else ""
        size = self.memory_gb * 1e9 / 2**30  # the size on the box, which says GB for GiB
        return f"{len(self.gpus)} x {self.gpus[0].name}, {size:.0f} GB{shared}"


def detect() -> Hardware:
    """Return the visible cards and the CPU cores of this machine."""
    return Hardware(gpus=_visible(_cards()), cores=len(os.sched_getaffinity(0)))


def ranks(machine: Hardware) -> tuple[int, int]:
    """Return the numbers of ranks of the run and on this machine: as launched, or one for each card here."""
    world_size = int(os.environ.get("WORLD_SIZE", max(1, len(machine.gpus))))
    return world_size, int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, max(1, len(machine.gpus)))))


def cores_of_rank() -> int:
    """Return how many cores a rank can keep busy; 0 if there are more ranks than cores."""
    cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    is_bound = cores * ranks <= int(os.environ.get("SLURM_CPUS_ON_NODE") or 0)  # srun gave each rank its own cores
    return cores if is_bound else cores // ranks


def processor() -> str:
    """Return the name of the CPU, on which rounding depends."""
    return _fact("model name") or platform.machine()


def is_amd() -> bool:
    return _fact("vendor_id") == "AuthenticAMD"


def _fact(name: str) -> str:
    """Return what Linux says of the CPU, or "" on another system."""
    facts = Path("/proc/cpuinfo")
    found = re.search(rf"^{name}\s*:(.*)", facts.read_text() if facts.is_file() else "", re.MULTILINE)
    return found[1].strip() if found else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


GROWING = "expandable_segments:True"


def prepare_cuda(engine: str = "auto") -> None:
    """Set environment variables of CUDA and torch. Call this before torch is imported."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order of nvidia-smi
    os.environ.setdefault("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", "0")  # needs NVML, which a container may lack
    # On H100 and B200, torch prefers cuDNN for attention, which takes up to half a second to plan for each new length,
    # and nearly every batch has new lengths.
    os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    # Segments that grow avoid fragmentation by batches of many lengths. WSL does not support them, and with them a vLLM
    # in this process could not free its memory while it sleeps.
    is_set = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(os.environ)
    if not (is_set or engine == "vllm_colocate" or is_wsl()):
        os.environ["PYTORCH_ALLOC_CONF"] = GROWING


def is_wsl() -> bool:
    """Return True under the Windows Subsystem for Linux."""
    return "microsoft" in platform.release().lower()


# --- nvidia-smi

PATIENCE_S = 30.0  # for nvidia-smi
QUERY = "index,uuid,name,memory.total,memory.used,memory.free,compute_cap,driver_version,mig.mode.current"
ANSWERS = "OCTET_NVIDIA_SMI"  # environment variable with which the launcher passes `answers` to its processes
CARD_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia")  # one exists if there is a card
HIDE_ALL = ("", "-1", "none", "void", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all cards on purpose
answers: dict[str, str] = json.loads(os.environ.get(ANSWERS, "{}"))
MIG_DEVICE = re.compile(r"\s+MIG (\S*?(\d+)gb\S*)\s+Device +\d+: \(UUID: (MIG-[^)]+)\)")


def nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi; "" if it fails or is missing."""
    program = shutil.which("nvidia-smi")
    return _answer_of([program, *arguments]) if program else ""


def _answer_of(command: Sequence[str]) -> str:
    """Return the output of a command; "" if it fails. The launcher passes the answers to the ranks."""
    query = shlex.join(command)
    if query not in answers:
        every_card = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        try:
            answer = subprocess.run(
                command, env=every_card, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except subprocess.TimeoutExpired:
            remedy = "Try it in a terminal, and restart the machine if it hangs there, too"
            raise ConfigError(query, f"it has not answered for {PATIENCE_S:g} seconds", remedy) from None
        answers[query] = answer.stdout if answer.returncode == 0 else ""  # nvidia-smi may exist without a driver
    return answers[query]


def driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver supports, which nvidia-smi prints above its table."""
    version = re.search(r"CUDA[ \w]*Version: *([\d.]+)", nvidia_smi())
    return version[1] if version else None


def _cards() -> list[Gpu]:
    """Return the cards of this machine. A card in MIG mode is replaced by its instances."""
    rows = _rows(nvidia_smi(f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"))
    if not rows and any(Path(file).exists() for file in CARD_FILES):  # nvidia-smi is missing, or old
        # the same command in every process, which finds these modules and none of the working folder
        start = f"import sys; sys.path[0] = {str(CHECKOUT)!r}; from trainer.machine import hardware; "
        rows = _rows(_answer_of([sys.executable, "-c", f"{start}[*map(print, hardware.cards_of_the_driver())]"]))
    return [gpu for row in rows for gpu in _card(*row)]


def _rows(answer: str) -> list[list[str]]:
    """Return the cells of each card: four from the driver, nine from nvidia-smi. Other lines are warnings."""
    return [[part.strip() for part in line.split(",")] for line in answer.splitlines() if line.count(",") in (3, 8)]


def cards_of_the_driver() -> Iterator[str]:
    """Yield the cards that CUDA's driver knows, in the format of `nvidia-smi --query-gpu=index,uuid,name,memory.total`,
    which is missing in WSL, in NixOS, and in containers without tools. This needs a process of its own, because the
    driver may crash or hang."""
    cuda, count = CDLL("libcuda.so.1"), c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(byref(count)):
        return
    for index in range(count.value):
        device, name, memory, identifier = c_int(), create_string_buffer(100), c_size_t(), (c_ubyte * 16)()
        cuda.cuDeviceGet(byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(byref(memory), device)
        cuda.cuDeviceGetUuid(identifier, device)
        yield f"{index}, GPU-{UUID(bytes=bytes(identifier))}, {name.value.decode()}, {memory.value >> 20}"


def _card(index: str, uuid: str, name: str, memory: str, *state: str) -> list[Gpu]:
    if not state or state[-1] == "Enabled":
        of_card = nvidia_smi("-L").partition(f"(UUID: {uuid})")[2].partition("\nGPU ")[0]
        found = filter(None, map(MIG_DEVICE.match, of_card.splitlines()))  # a profile, such as 1g.10gb, has the memory
        if instances := [Gpu(int(index), mig[3], f"{name} MIG {mig[1]}", float(mig[2])) for mig in found]:
            return instances
    shares_ram = not _is_number(memory)  # [N/A] for a card with unified memory
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9 if shares_ram else _gigabytes(memory)
    use = None
    if state and all(map(_is_number, state[:3])):
        use = CardState(_gigabytes(state[0]), _gigabytes(state[1]), float(state[2]), state[3])
    return [Gpu(int(index), uuid, name, size, use, shares_ram)]


def _is_number(text: str) -> bool:
    return text.replace(".", "").isdigit()


def _gigabytes(mebibytes: str) -> float:
    return float(mebibytes) * 2**20 / 1e9


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES selects, of MIG instances only the first one, as CUDA does. Raise
    ConfigError if its first name is unknown."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = gpus if chosen is None else []
    for name in map(str.strip, (chosen or "").split(",")):
        known = [gpu for gpu in gpus if name and (name == str(gpu.index) or gpu.uuid.startswith(name))]
        if not known:
            break
        visible.append(known[0])
    if gpus and not visible and chosen not in HIDE_ALL:
        here = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={chosen}", "there is no such card", f"This machine has {here}")
    instances = [gpu for gpu in visible if gpu.uuid.startswith("MIG-")]
    return tuple(instances[:1] or visible)


# --- RAM


def free_ram(groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the bytes that programs can still allocate, swap included, within the limit of a container or a job."""
    import psutil

    return min([psutil.virtual_memory().available + psutil.swap_memory().free, *_limits(groups, own)])


def _limits(groups: Path, own: Path) -> Iterator[int]:
    """Yield the free bytes under each memory limit of this process's control group and its parents."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", maxsplit=2)
        root, names, cache = groups, ("memory.max", "memory.current"), ""
        if "memory" in controllers:  # version 1, with a tree of its own for each controller
            root, names, cache = groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_"
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit, current = (group / name for name in names)
            if limit.is_file() and limit.read_text().strip().isdigit():
                rows = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                # the kernel evicts cached files when memory is needed
                cached = sum(int(rows.get(f"{cache}{kind}_file", 0)) for kind in ("inactive", "active"))
                yield max(0, int(limit.read_text()) - int(current.read_text()) + cached)
