"""Lines that stay at the foot of a terminal, below everything that is printed."""

from __future__ import annotations

from threading import RLock
from typing import Any

from rich.console import RenderableType

from trainer.machine.console import Console


class Footer:
    """Prints text, and keeps parts, such as a panel and a bar, below it. Elsewhere than on a terminal it only prints.

    The cursor waits in an empty line above the parts. So whatever else is printed (by another rank, a library, a reward
    function) writes over the parts, which are drawn again below it. With rich.live the cursor waits below them, and the
    next drawing would erase these lines.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_shown = console.is_interactive and not console.quiet
        self._parts: dict[str, str] = {}
        self._lock = RLock()

    def print(self, content: RenderableType) -> None:
        with self._lock:
            self._erase()
            self.console.print(content)
            self._draw()

    def show(self, name: str, content: RenderableType) -> None:
        """Draw a part, in place of what it was."""
        if self.is_shown:
            with self._lock:
                with self.console.capture() as captured:
                    self.console.print(content, soft_wrap=False)
                self._erase()
                self._parts[name] = captured.get()
                self._draw()

    def hide(self, *names: str) -> None:
        """Remove parts, or all of them if none is named."""
        with self._lock:
            self._erase()
            for name in names or list(self._parts):
                self._parts.pop(name, None)
            self._draw()

    def _erase(self) -> None:
        if self._parts:
            self._write("\r\x1b[J")

    def _draw(self) -> None:
        if self._parts:
            lines = "".join(self._parts.values()).splitlines()[: self.console.height - 2]
            self._write("\n" + "\n".join(lines) + f"\x1b[{len(lines)}A\r")

    def _write(self, codes: str) -> Any:
        self.console.file.write(codes)
        self.console.file.flush()
