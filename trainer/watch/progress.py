"""Lines that stay at the foot of a terminal, and how much of a task is done."""

from __future__ import annotations

from threading import RLock
from time import perf_counter
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from trainer.machine.console import Console

BAR = 20  # characters
PATIENCE_S = 2.0  # of a task that may be done at once


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


class Progress:
    """Shows how much of a task is done: with a bar on a terminal, else with a line each quarter.

    No line is printed before `patience` seconds. Without a footer it goes to standard error.
    """

    def __init__(self, task: str, total: int, footer: Footer | None = None, patience: float = PATIENCE_S) -> None:
        self.task = task
        self.total = max(1, total)
        self.done = 0
        self.footer = footer or Footer(Console(stderr=True, soft_wrap=True))
        self._began = perf_counter()
        self._next_drawing = self._began + patience * (not self.footer.is_shown)

    def __enter__(self) -> Progress:
        self._began = perf_counter()
        self._show(is_due=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.footer.hide("progress")

    def advance(self, amount: int = 1) -> None:
        before, self.done = self.done, self.done + amount
        self._show(is_due=4 * self.done // self.total > 4 * before // self.total)

    def _show(self, is_due: bool) -> None:
        now = perf_counter()
        if self.footer.is_shown:
            if is_due or now >= self._next_drawing:
                filled = BAR * min(self.done, self.total) // self.total
                self.footer.show("progress", Text(f"{'█' * filled}{'░' * (BAR - filled)} {self._text(now)}"))
                self._next_drawing = now + 0.25
        elif is_due and now >= self._next_drawing:
            self.footer.print(f"octet: {self._text(now)}")

    def _text(self, now: float) -> str:
        done = self.done / self.total
        left = f", {clock((now - self._began) * (1 - done) / done)} left" if 0 < done < 1 else ""
        return f"{self.task}: {done:.0%}{left}"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(min(1e9, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
