"""Tests that run over the stub of a card: `bash tests/run.sh cuda` makes their environment."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, ran

if "CUDA_STUB" not in os.environ:
    collect_ignore_glob = ["test_*.py"]  # they import what is not there


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == ROOT / "tests/cuda":
            item.add_marker(pytest.mark.cuda)


def on_card(
    command: Sequence[str], folder: Path = ROOT, device: str = "cuda", check: bool = False, **card: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python on a card with these parameters."""
    environment = os.environ | {f"CUDA_STUB_{name.upper()}": str(value) for name, value in card.items()}
    environment["DS_ACCELERATOR"] = device  # tests/conftest.py has set it to cpu
    libraries = environment["LD_LIBRARY_PATH"].split(":")
    if card.get("nvml") is False:
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in libraries if not path.endswith("/nvml"))
    return ran(sys.executable, *command, cwd=folder, check=check, env=environment, timeout=500)


def answer(code: str, **card: Any) -> Any:
    """Return what a program prints as JSON on a card with these parameters."""
    return json.loads(on_card(["-c", code], check=True, **card).stdout)
