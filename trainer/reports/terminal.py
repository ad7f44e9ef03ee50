"""A run on a terminal: progress, small curves, alarms, the last answers. Read from the files of its folder."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from trainer.machine.visible import around, visible
from trainer.reports.run_files import RunFiles, phases
from trainer.watch.diagnosis import diagnose

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of a small curve, in characters
RECENT = 10  # steps from which the time that is left is estimated
LONGEST = 400  # characters of an answer: its end, where the result is
WIDE = 100  # columns where the width is unknown, and of one run where it is known


def shown(runs: Sequence[RunFiles], width: int) -> Columns:
    """Return the runs side by side, as many as fit."""
    each = min(width, max(WIDTH + 34, width // len(runs) - 1), WIDE)
    return Columns([Panel(_run(run), title=Text(visible(run.name)), width=each) for run in runs])


def _run(run: RunFiles) -> Group:
    samples = (_answer(name, sample) for name, sample in run.last_samples().items())
    alarms = (Text(f"! {finding.text}", style="red") for finding in diagnose(run.history))
    return Group(*_progress(run), *_curves(run), *alarms, *samples)


def _progress(run: RunFiles) -> Iterator[Text]:
    """Yield a bar, and a line with the steps that are done and the time that is left."""
    done = WIDTH * min(run.steps, run.total_steps) // run.total_steps
    yield Text("█" * done + "░" * (WIDTH - done), style="blue")
    yield Text(f"step {run.steps} of {run.total_steps}, {_state(run)}", style="bold")
    if pairs := run.evaluation.get("comparisons"):
        yield Text(f"verdict: {visible(pairs[0]['verdict'])}")


def _state(run: RunFiles) -> str:
    if run.has_ended:
        return "ended"
    path = run.folder / "metrics.jsonl"
    if not path.exists():
        return "not one step is logged yet"
    left = seconds_of_a_step(run.metrics) * (run.total_steps - run.steps)
    return f"{clock(left)} left, last step {clock(max(0.0, time.time() - path.stat().st_mtime))} ago"


def seconds_of_a_step(records: Sequence[Mapping[str, Any]]) -> float:
    last = [record for record in records if record["step"]][-RECENT:]
    names = [f"time/{name}" for name in phases(last)]
    return fmean(sum(record.get(name, 0.0) for name in names) for record in last) if last else 0.0


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _curves(run: RunFiles) -> Iterator[Text]:
    accuracy = f"accuracy/{run.config.reward.answer}"
    named = {"reward": "reward/mean", "accuracy": accuracy, "held-out": "eval/accuracy"}
    for name, metric in (named | {"tokens": "length", "entropy": "entropy"}).items():
        if values := [record[metric] for record in run.metrics if metric in record]:
            yield Text(f"{name:<9} {blocks(values):<{WIDTH}} {values[0]:.3g} to {values[-1]:.3g}")


def blocks(values: Sequence[float], width: int = WIDTH) -> str:
    """Return a curve of block characters, from the lowest value to the highest; neighbours are averaged."""
    finite = [value for value in values if abs(value) < float("inf")]
    size = -(-len(finite) // width) or 1
    means = [fmean(finite[start : start + size]) for start in range(0, len(finite), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    heights = [(mean - low) / (high - low) if high > low else 0.5 for mean in means]
    return "".join(BLOCKS[min(7, int(8 * height))] for height in heights)


def _answer(name: str, sample: Mapping[str, Any]) -> Text:
    """Return an answer with what was read from it marked."""
    read = sample["strict"] if sample["strict"] is not None else sample["lenient"]
    before, found, after = map(visible, around(sample["completion"][-LONGEST:], read))
    said = "no answer found" if read is None else f"read {visible(read)}"
    head = f"\n{name}, step {sample['step']}, {said}, the answer is {visible(sample['gold'])}\n"
    return Text.assemble((head, "bold"), before, (found, "reverse"), after)


def console() -> Console:
    """Return a console that prints plain text where standard output is not a terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=WIDE)
