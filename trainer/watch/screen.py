"""What a person sees while a run goes on: a line that moves in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import perf_counter

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trainer.ranks import distributed

PERMANENT_LINES = 12  # lines of progress that stay on the screen in the course of a run


class Screen:
    """Prints for rank 0; on the other ranks it is silent."""

    def __init__(self, total_steps: int = 0, first_step: int = 0, quiet: bool = False, stderr: bool = False) -> None:
        self.console = Console(quiet=quiet, stderr=stderr, highlight=False, soft_wrap=True)
        self.total_steps = total_steps
        self._every = max(1, total_steps // PERMANENT_LINES)
        self._first_step = first_step
        self._began = perf_counter()
        self._live = Live(console=self.console, refresh_per_second=4, transient=True)

    def start(self) -> None:
        """The first step begins: what was before it says nothing about the time that is left."""
        self._began = perf_counter()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """From whichever rank."""
        if self.console.quiet:
            print(f"rank {distributed.rank()}: {text}", file=sys.stderr)
        else:
            self.say(text)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        line = progress_line(step, self.total_steps, metrics, self._remaining(step))
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


def progress_line(step: int, total: int, metrics: Mapping[str, float], seconds_left: float) -> str:
    """One step in one line, in the order of the loop."""
    minutes, seconds = divmod(round(seconds_left), 60)
    parts = [
        f"{step:>{len(str(total))}}/{total}",
        f"rollout {metrics['time/rollout']:.1f}s {metrics['length']:.0f} tokens",
        f"reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else "reward none",
        f"correct {metrics['accuracy/strict']:.0%}",
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
