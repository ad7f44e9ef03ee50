"""Show the progress of a run or a task: a moving line in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter

from rich import progress
from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from trainer.machine.visible import visible
from trainer.ranks import distributed

PERMANENT_LINES = 12  # lines of progress that stay on the screen during a run


class Screen:
    """Prints on rank 0, and nothing on the other ranks."""

    def __init__(
        self,
        total_steps: int = 0,
        first_step: int = 0,
        answer: str = "strict",
        quiet: bool = False,
        stderr: bool = False,
    ) -> None:
        self.console = Console(quiet=quiet, stderr=stderr, highlight=False, soft_wrap=True)
        self.total_steps = total_steps
        self._answer = answer
        self._every = max(1, total_steps // PERMANENT_LINES)
        self._first_step = first_step
        self._began = perf_counter()
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def start(self) -> None:
        """Measure time from here: what came before the first step does not predict the time that is left."""
        self._began = perf_counter()

    def say(self, text: str) -> None:
        self.console.print(visible(text), markup=False)

    def warn(self, text: str) -> None:
        """Print a warning, from any rank."""
        if self.console.quiet:
            print(f"rank {distributed.rank()}: {visible(text)}", file=sys.stderr)
        else:
            self.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        line = progress_line(step, self.total_steps, metrics, self._remaining(step), self._answer)
        if step in (1, self.total_steps) or step % self._every == 0:
            self.say(line)
        if self.console.is_terminal and not self.console.quiet:
            self._live.start()
            self._live.update(Text(line, style="bold"), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def show(self, table: Table) -> None:
        self.console.print(table)

    def _remaining(self, step: int) -> float:
        each = (perf_counter() - self._began) / max(1, step - self._first_step)
        return each * (self.total_steps - step)


class Progress:
    """Shows on standard error how much of a task is done: with a bar in a terminal, else with a line each quarter."""

    def __init__(self, task: str, total: int, console: Console | None = None) -> None:
        self.task = task
        self.total = max(1, total)
        self.done = 0
        self.console = console or Console(stderr=True, quiet=not distributed.is_main(), soft_wrap=True)
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._bar.add_task(task, total=self.total)

    def __enter__(self) -> Progress:
        self._bar.start()
        self._print_quarter()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self) -> None:
        self.done += 1
        self._bar.advance(progress.TaskID(0))
        if 4 * self.done // self.total > 4 * (self.done - 1) // self.total:
            self._print_quarter()

    def _print_quarter(self) -> None:
        if not self.console.is_terminal:
            self.console.print(f"octet: {self.task}: {self.done / self.total:.0%}", highlight=False, markup=False)


def progress_line(
    step: int, total: int, metrics: Mapping[str, float], seconds_left: float, answer: str = "strict"
) -> str:
    """Return one step in one line, in the order of the loop. The accuracy that `reward.answer` pays for comes first."""
    minutes, seconds = divmod(round(seconds_left), 60)
    correct = f"correct {metrics['accuracy/strict']:.0%}"
    if answer == "lenient":
        correct = f"correct {metrics['accuracy/lenient']:.0%} (strict {metrics['accuracy/strict']:.0%})"
    parts = [
        f"{step:>{len(str(total))}}/{total}",
        f"rollout {metrics['time/rollout']:.1f}s {metrics['length']:.0f} tokens",
        f"reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else "reward none",
        correct,
        f"dead {metrics['dead_groups']:.0%}",
    ]
    if "loss" in metrics:
        parts += [
            f"loss {metrics['loss']:+.3f}",
            f"entropy {metrics['entropy']:.2f}",
            f"step {metrics['time/step']:.1f}s",
        ]
    if "grad_norm" in metrics:
        parts.append(f"grad {metrics['grad_norm']:.2f}")
    return "  ".join([*parts, f"{minutes}:{seconds:02d} left"])
