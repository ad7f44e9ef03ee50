"""The log of NCCL, whose last lines explain in an error why a collective has failed."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

NCCL_CHOICES = ("NCCL_DEBUG", "NCCL_DEBUG_FILE")
NCCL_PARTS = "INIT,NET,ENV"  # bootstrap, network and environment variables
NCCL_WARNING = " NCCL WARN "
NCCL_SHOWN = 8  # number of lines of NCCL's log in an error


class NcclLog:
    """NCCL's log of this process, from start() to stop(), unless the user has configured logging. It is too long for
    the screen, but explains why a collective failed, so the error shows its last lines. Without an error the file is
    deleted."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._is_needed = False  # True once an error has named the file

    def start(self) -> None:
        """Set NCCL's environment variables, unless the user has set them. This must precede the start of NCCL."""
        if self._folder or any(name in os.environ for name in NCCL_CHOICES):
            return
        with suppress(OSError):  # a full disk must not prevent training
            self._folder = Path(tempfile.mkdtemp(prefix="octet-nccl-"))
            os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_FILE"] = "INFO", str(self._folder / "%p.log")
            os.environ.setdefault("NCCL_DEBUG_SUBSYS", NCCL_PARTS)

    def excerpt(self) -> str:
        """Return the last lines for an error message, warnings first, with the path of the file; "" if it is empty."""
        file = self._folder / f"{os.getpid()}.log" if self._folder else Path()
        lines = [line for line in file.read_text(errors="replace").splitlines() if line] if file.is_file() else []
        if not lines:
            return ""
        self._is_needed = True
        by_weight = sorted(lines, key=lambda line: NCCL_WARNING in line)  # a stable sort: warnings last
        shown = sorted(by_weight[-NCCL_SHOWN:], key=lambda line: NCCL_WARNING not in line)
        return "\n".join([f". NCCL's log is in {file} on this node, and ends with:", *(f"  {line}" for line in shown)])

    def stop(self) -> None:
        """Delete the file, unless an error has named it."""
        if self._folder:
            for name in NCCL_CHOICES:
                os.environ.pop(name, None)
            if not self._is_needed:
                shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None
