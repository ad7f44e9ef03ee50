"""NCCL's log of this process, kept in a file until an error needs it.

It is too long for the screen, but it explains why a collective failed: the error then shows its last lines. A run that
ends well deletes the file.
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


class NcclLog:
    """The log from start() to stop(). Before, after, and where the user has configured NCCL's log, there is none."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_needed = False  # an error has named the file

    def start(self) -> None:
        """Set NCCL's environment variables, before NCCL starts; do nothing if the user has set them."""
        if self._folder or any(name in os.environ for name in CHOICES):
            return
        with suppress(OSError):  # a full disk is no reason not to train
            self._folder = Path(tempfile.mkdtemp(prefix="octet-nccl-"))
            os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "INFO", str(self._folder / "%p.log")
            os.environ.setdefault("NCCL_DEBUG_SUBSYS", PARTS)

    def excerpt(self) -> str:
        """Return the last lines for an error message, warnings first, with the path of the file; "" if it is empty."""
        file = self._folder / f"{os.getpid()}.log" if self._folder else Path()
        lines = [line for line in file.read_text(errors="replace").splitlines() if line] if file.is_file() else []
        if not lines:
            return ""
        self._is_needed = True
        by_weight = sorted(lines, key=lambda line: WARNING in line)  # a stable sort: warnings last
        shown = sorted(by_weight[-SHOWN:], key=lambda line: WARNING not in line)
        return "\n".join([f". NCCL's log is in {file} on this node, and ends with:", *(f"  {line}" for line in shown)])

    def stop(self) -> None:
        """Delete the file, unless an error has named it."""
        if self._folder:
            for name in CHOICES:
                os.environ.pop(name, None)
            if not self._is_needed:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
