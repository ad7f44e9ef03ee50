"""A run on a terminal: progress, small curves, alarms and the last answers, read from the files in its folder.

`octet watch` shows it for any runs, and a training run shows it below its own output.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.columns import Columns
from rich.panel import Panel
from rich.text import Text

from trainer.machine.console import Console
from trainer.machine.safe_text import around, visible
from trainer.run_folder.reader import RunFiles, as_written, phases, read_run, seconds_of
from trainer.run_folder.stopped import stopped
from trainer.watch.alarms import lasting
from trainer.watch.footer import clock
from trainer.watch.measure import Measure

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # of a small curve, in characters
BESIDE = 30  # characters beside a curve: its name, and its first and last value
RECENT = 10  # steps from which the remaining time is estimated
LONGEST = 400  # last characters of an answer, which have its result
WIDE = 100  # columns if the width is unknown, and the most columns for a run
SHOWN_PHASES = 4


def shown(runs: Sequence[RunFiles], console: Console, height: int | None = None) -> Columns:
    """Return the runs, as many side by side as fit. If a height is given, alarms and answers are shortened to it."""
    each = min(console.width, max(WIDTH + BESIDE + 4, console.width // len(runs) - 1), WIDE)
    rows = -(-len(runs) // max(1, console.width // each))
    with as_written(*(run.folder for run in runs)):
        return Columns([_panel(run, console, each, height and height // rows) for run in runs])


def of_folder(folder: Path, console: Console, height: int) -> Columns:
    """Return the run in a folder, in at most `height` lines."""
    return shown([read_run(folder)], console, height)


def _panel(run: RunFiles, console: Console, width: int, height: int | None) -> Panel:
    inside, room = width - 4, None if height is None else height - 2
    title, run = run.name if run.current is run else f"{run.name}, warm-up", run.current

    def wrapped(texts: Iterator[Text]) -> list[Text]:
        return list(chain.from_iterable(text.wrap(console, inside) for text in texts))

    lines = wrapped(chain(_progress(run, inside), _curves(run, inside), _phases(run)))
    alarms = wrapped(Text(f"! {alarm}", style="red") for alarm in lasting(run.history))
    answers = [wrapped(iter([_answer(name, sample, run.measure)])) for name, sample in run.last_samples().items()]
    if room is None:
        answers = [[Text(), *answer] for answer in answers]
    else:
        del alarms[max(0, room - len(lines)) // 2 :]
        each = (room - len(lines) - len(alarms)) // max(1, len(answers))
        answers = [[*answer[:1], *answer[1:][-max(1, each - 1) :]] for answer in answers if each > 1]
    everything = Text("\n").join([*lines, *alarms, *chain.from_iterable(answers)][:room])
    return Panel(everything, title=Text(visible(title)), width=width)


def _progress(run: RunFiles, width: int) -> Iterator[Text]:
    size = min(WIDTH, width)
    done = size * min(run.steps, run.total_steps) // run.total_steps
    yield Text("█" * done + "░" * (size - done), style="blue")
    yield Text(f"step {run.steps} of {run.total_steps}, {state(run)}", style="bold")
    if run.has_ended:
        yield run.verdict.shown


def state(run: RunFiles) -> str:
    """Return whether a run has ended or was stopped, or else the remaining time of training."""
    if run.has_ended:
        return "ended"
    if reason := stopped(run):
        return reason
    path = run.folder / "metrics.jsonl"
    if not run.steps:
        return "no step is logged yet"
    last = run.history.steps[-RECENT:]
    left = fmean(map(seconds_of, last)) * (run.total_steps - run.steps)
    return f"{clock(left)} of training left, last step at {datetime.fromtimestamp(path.stat().st_mtime):%H:%M:%S}"


def _curves(run: RunFiles, width: int) -> Iterator[Text]:
    size, measure = max(1, min(WIDTH, width - BESIDE)), run.measure
    named = {"reward": "reward/mean", measure.name: measure.of_training, "held-out": "", "tokens": "length"}
    for name, metric in (named | {"entropy": "entropy"}).items():
        if values := run.history.of(metric) if metric else [share.value for share, _ in run.evaluated]:
            yield Text(f"{name:<9} {blocks(values, size):<{size}} {values[0]:.3g} to {values[-1]:.3g}")


def blocks(values: Sequence[float], width: int = WIDTH) -> str:
    """Return a curve of block characters, scaled to its lowest and highest value. Neighbours are averaged to fit."""
    finite = [value for value in values if abs(value) < float("inf")]
    size = -(-len(finite) // width) or 1
    means = [fmean(finite[start : start + size]) for start in range(0, len(finite), size)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    heights = [(mean - low) / (high - low) if high > low else 0.5 for mean in means]
    return "".join(BLOCKS[min(7, int(8 * height))] for height in heights)


def _phases(run: RunFiles) -> Iterator[Text]:
    """Yield the mean seconds of the longest phases, and the peak and the planned memory of the largest."""
    last = run.history.steps[-RECENT:]
    seconds = {name: fmean(record.get(f"time/{name}", 0.0) for record in last) for name in phases(last)}
    if longest := sorted(seconds, key=lambda name: -seconds[name])[:SHOWN_PHASES]:
        yield Text(f"{'seconds':<9} {', '.join(f'{name} {seconds[name]:.2g}' for name in longest)}")
    peaks = {name: max(record.get(f"memory/{name}", 0.0) for record in last) for name in phases(last, "memory")}
    largest = sorted(peaks, key=lambda name: (name not in run.memory_plan, -peaks[name]))[:SHOWN_PHASES]
    planned = {name: f" of {size / 1e9:.2f} planned" for name, size in run.memory_plan.items()}
    if not largest or not peaks[largest[0]]:
        return
    if not planned and len({f"{peaks[name]:.2f}" for name in largest}) == 1:  # on a CPU, that of the whole process
        yield Text(f"{'memory':<9} {peaks[largest[0]]:.2f} GB")
    else:
        used = (f"{name} {peaks[name]:.2f}{planned.get(name, '')}" for name in largest)
        yield Text(f"{'memory':<9} {', '.join(used)} GB")


def _answer(name: str, sample: Mapping[str, Any], measure: Measure) -> Text:
    """Return an answer with what was read from it marked."""
    read = None if measure.is_reward else read_from(sample)
    before, found, after = map(visible, around(sample["completion"][-LONGEST:], read))
    if measure.is_reward:
        result = earned(sample)
    else:
        found_text = "no answer found" if read is None else f"read {visible(read)}"
        result = f"{found_text}, the answer is {visible(sample['gold'])}"
    head = f"{name}, step {sample['step']}, {result}\n"
    turns = [(f"{visible(one['text'])}\n", "" if one["role"] == "model" else "dim") for one in earlier_turns(sample)]
    return Text.assemble((head, "bold"), *turns, before, (found, "reverse"), after)


def read_from(answer: Mapping[str, Any]) -> str | None:
    """Return what was read from an answer: in the format asked for, or else in any."""
    return answer["strict"] if answer["strict"] is not None else answer["lenient"]


def earned(sample: Mapping[str, Any]) -> str:
    return "no reward" if sample["reward"] is None else f"reward {sample['reward']:.3g}"


def earlier_turns(sample: Mapping[str, Any]) -> Sequence[Mapping[str, str]]:
    """Return the turns before the last one of an answer. Those of an inline calculator are within its text."""
    turns = list(sample.get("turns", ()))
    is_whole = "".join(turn["text"] for turn in turns) == sample["completion"]
    return [] if is_whole else turns[:-1]


def are_live(runs: Sequence[RunFiles]) -> bool:
    return not all(run.has_ended or stopped(run) for run in runs)
