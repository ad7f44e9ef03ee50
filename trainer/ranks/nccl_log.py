"""What NCCL says about itself, in a file of each process until somebody needs it.

It is too much for the screen, and it is what explains a collective that fails: then the error has its last lines. A run
that ends well leaves nothing behind.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

CHOICES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
PARTS = "INIT,NET,ENV"  # how the ranks find each other, over which network, and with which settings
WARNING = " NCCL WARN "
SHOWN = 8  # lines in an error

_folders: list[Path] = []  # of this process, while it listens
_needed: list[Path] = []  # those that an error has named


def listen() -> None:
    """Before NCCL starts. Whoever has chosen what it says and where to is left alone."""
    if _folders or any(name in os.environ for name in CHOICES):
        return
    with suppress(OSError):  # no room for it: no reason not to train
        _folders.append(Path(tempfile.mkdtemp(prefix="octet-nccl-")))
        os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "INFO", str(_folders[0] / "%p.log")
        os.environ.setdefault("NCCL_DEBUG_SUBSYS", PARTS)


def said() -> str:
    """The lines that matter, warnings first, and where all of them are; nothing if it has said nothing."""
    file = _folders[0] / f"{os.getpid()}.log" if _folders else Path()
    lines = [line for line in file.read_text(errors="replace").splitlines() if line] if file.is_file() else []
    if not lines:
        return ""
    _needed[:] = _folders
    by_weight = sorted(lines, key=lambda line: WARNING in line)  # in their order, warnings last
    shown = sorted(by_weight[-SHOWN:], key=lambda line: WARNING not in line)
    return "\n".join([f". What NCCL said is in {file} on this node, and ends with:", *(f"  {line}" for line in shown)])


def forget() -> None:
    """The end of what it may say."""
    for folder in _folders:
        for name in CHOICES:
            os.environ.pop(name, None)
        if folder not in _needed:
            shutil.rmtree(folder, ignore_errors=True)
    _folders.clear()
