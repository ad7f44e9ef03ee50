"""Lines at the bottom of a terminal, the progress of a task, and the remaining time of a run."""

from collections.abc import Callable
from statistics import fmean
from threading import RLock
from time import perf_counter

from rich.console import RenderableType
from rich.text import Text

from trainer.machine.console import Console

BAR = 20  # characters
PATIENCE_S = 2.0  # a task that ends sooner prints no progress
RECENT = 8  # last steps whose mean predicts the next ones: updates become cheaper when more groups are dead


class Footer:
    """Prints text, and on a terminal keeps parts, such as a panel and a bar, below it.

    The cursor waits in an empty line above the parts. Therefore other output (of another rank, a library, a reward
    function) overwrites the parts, which are then redrawn below it. With rich.live the cursor would wait below the
    parts, and the next drawing would erase that output.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_shown = console.is_interactive and not console.quiet
        self._parts: dict[str, str] = {}
        self._lock = RLock()

    def print(self, content: RenderableType, is_command: bool = False) -> None:
        """Print text. On a terminal, lines are wrapped between words, except those of a command to copy."""
        with self._lock:
            self._erase()
            self.console.print(content, soft_wrap=is_command or not self.console.is_terminal)
            self._draw()

    def show(self, name: str, content: RenderableType) -> None:
        """Draw a part, replacing its earlier content."""
        if self.is_shown:
            with self._lock:
                with self.console.capture() as captured:
                    self.console.print(content, soft_wrap=False)
                self._erase()
                self._parts[name] = captured.get()
                self._draw()

    def hide(self, *names: str) -> None:
        """Remove the named parts, or all parts if none is named."""
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

    def _write(self, codes: str) -> None:
        self.console.file.write(codes)
        self.console.file.flush()


class Progress:
    """Shows the progress of a task: with a bar on a terminal, otherwise with a line for each quarter, but not in the
    first `patience` seconds. The default footer prints to standard error. `ended` gets the seconds of the task."""

    def __init__(
        self,
        task: str,
        total: int,
        footer: Footer | None = None,
        patience: float = PATIENCE_S,
        ended: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.task = task
        self.total = max(1, total)
        self.done = 0
        self.footer = footer or Footer(Console(stderr=True, soft_wrap=True))
        self._ended = ended
        self._began = perf_counter()
        self._next_drawing = self._began + patience * (not self.footer.is_shown)

    def __enter__(self) -> "Progress":
        self._show(is_due=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.footer.hide("progress")
        self._ended(perf_counter() - self._began)

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


class TimeLeft:
    """Predicts the remaining time of a run from its steps and evaluations. There is an evaluation every `every` steps,
    and there are `at_end` evaluations after the last step."""

    def __init__(self, total_steps: int, every: int | None, at_end: int) -> None:
        self.total_steps, self.every, self.at_end = total_steps, every, at_end
        self._steps: list[float] = []
        self._evaluation = self._sampled = 0.0
        self.start()

    def start(self) -> None:
        self._since, self._evaluations = perf_counter(), 0.0

    def evaluated(self, seconds: float) -> None:
        if self._evaluations:  # sampled answers follow the greedy ones before the first step and at the end
            self._sampled = seconds
        else:
            self._evaluation = seconds
        self._evaluations += seconds

    def after(self, step: int) -> float:
        """Return the remaining seconds after a step that has just ended, including an evaluation that may follow it.
        The first step is ignored later, because it includes warming up."""
        self._steps.append(perf_counter() - self._since - self._evaluations)
        self.start()
        each = fmean((self._steps[1:] or self._steps)[-RECENT:])
        between = (self.total_steps - 1) // self.every - (step - 1) // self.every if self.every else 0
        evaluations = between + self.at_end + (self._sampled > 0)  # the last greedy answers are repeated for these
        return each * (self.total_steps - step) + evaluations * self._evaluation + self._sampled


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(min(1e9, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
