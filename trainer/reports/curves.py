"""The curves of runs, and the files that `octet plot` writes. Runs that differ only in their seed become one curve."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import NamedTuple

from trainer.config.nearest_name import did_you_mean
from trainer.config.read_yaml import written
from trainer.config.settings import fields
from trainer.errors import ConfigError
from trainer.machine.safe_text import visible
from trainer.reports.chart import HEIGHT, WIDTH, Chart, Curve, Value, colour_of, label, svg, thinned
from trainer.reports.markup import Html, tag
from trainer.run_folder.changed_settings import NO_EFFECT
from trainer.run_folder.reader import RunFiles, differing, names_of, phases

Range = tuple[float, float, float]  # a value, and the lower and upper end of its range
OF_ALL_PHASES = {"time/*": "seconds of a step", "memory/*": "memory at its peak, GB"}
LONGEST_NAME = 60
COLUMNS = 2  # of charts in a file
HELD_OUT = "held_out"
GAP, LINE = 14.0, 16.0


class Series(NamedTuple):
    """What a curve shows: a metric, all phases of a step together (`time/*`, `memory/*`), or the result by which a run
    is judged, in training or held-out, if that is an accuracy or a reward (`training/accuracy`, `held_out/reward`)."""

    name: str
    metric: str
    dots: bool = False

    def value(self, run: RunFiles, record: Mapping[str, float]) -> Range | None:
        """Return the value in a line of a run's metrics, if there is one."""
        name = self.metric
        if name == f"{HELD_OUT}/{run.measure.name}":
            return run.held_out(record)
        if name == f"training/{run.measure.name}":
            name = run.measure.of_training
        if name in OF_ALL_PHASES:
            found = [record[f"{name[:-2]}/{phase}"] for phase in phases([record], name[:-2])]
            return (sum(found) if name == "time/*" else max(found),) * 3 if found else None
        return (record[name],) * 3 if name in record else None


# The curves of each chart of each file, the most important first.
CHARTS: dict[str, dict[str, list[Series]]] = {
    "curves": {
        "accuracy": [Series("training", "training/accuracy"), Series("held-out, 95 %", "held_out/accuracy", dots=True)],
        "mean reward": [Series("reward", "reward/mean"), Series("held-out, 95 %", "held_out/reward", dots=True)],
        "tokens of an answer": [Series("length", "length")],
        "entropy of a token": [Series("entropy", "entropy")],
    },
    "details": {
        "reward of an answer": [Series("lowest", "reward/min"), Series("highest", "reward/max")],
        "KL to the reference, a token": [Series("KL", "kl")],
        "loss": [Series("loss", "loss")],
        "norm of the gradient": [Series("norm", "grad_norm")],
        **{title: [Series("all", metric)] for metric, title in OF_ALL_PHASES.items()},
    },
}
PERCENT = "accuracy"


class Group(NamedTuple):
    """A run, or several that differ only in their seed."""

    name: str
    runs: Sequence[RunFiles]


def groups_of(runs: Sequence[RunFiles]) -> list[Group]:
    """Group the runs that differ only in their seed. If two of them have the same seed, each run is its own group."""
    same: dict[str, list[RunFiles]] = defaultdict(list)
    compared = [key for key in fields() if key not in NO_EFFECT | {"run.seed"}]
    for run in runs:
        same[str([*(run.given[key] for key in compared), run.code])].append(run)
    keys = [key for key in differing([run.given for run in runs]) if key != "run.seed"]
    names = names_of(runs)
    groups = []
    for alike in same.values():
        is_group = len({run.settings["run.seed"] for run in alike}) == len(alike)
        groups += [alike] if is_group else [[run] for run in alike]
    return [Group(_name([names[run.folder] for run in group], group[0], keys), group) for group in groups]


def _name(names: Sequence[str], run: RunFiles, keys: Sequence[str]) -> str:
    """Return the names of the runs of a group, with as many of its distinguishing settings as fit."""
    seeds = f" ({len(names)} seeds)" if len(names) > 1 else ""
    texts = [f"{key}={written(run.given[key])}" for key in keys]
    shown = [one for at, one in enumerate(texts) if not at or len(" ".join(texts[: at + 1])) <= LONGEST_NAME]
    more = [f"and {len(texts) - len(shown)} more"] if len(shown) < len(texts) else []
    settings = f", {' '.join([*shown, *more])}" if texts else ""
    return f"{', '.join(names)}{seeds}{settings}"


def charts_of(groups: Sequence[Group], file: str) -> list[Chart]:
    """Return the charts of a file, except those for which the runs have no metrics."""
    charts = (chart(title, groups, series) for title, series in CHARTS[file].items())
    return [one for one in charts if one.curves]


def chart(title: str, groups: Sequence[Group], series: Sequence[Series]) -> Chart:
    """Return a chart with a colour for each run, or for each series if there is one run."""
    alone, curves = len(groups) == 1, []
    series = [one for one in series if any(_values(group, one) for group in groups)]
    for number, group in enumerate(groups):
        for which, one in enumerate(series):
            name = one.name if alone else f"{group.name}, {one.name}" if len(series) > 1 else group.name
            if values := thinned(_values(group, one)):
                curves.append(Curve(name, values, which if alone else number, one.dots))
    dots = "" if alone else "".join(f" (dots: {one.name})" for one in series if one.dots)
    return Chart(f"{title}{dots}", curves, title == PERCENT, legend=alone)


def _values(group: Group, one: Series) -> list[Value]:
    """Return the mean over the runs of a group at each step that all have made, and the range that includes them."""
    ranges: dict[int, list[Range]] = defaultdict(list)
    last = min((run.steps for run in group.runs if run.steps), default=0)
    for run in group.runs:
        for record in run.metrics:
            if record["step"] <= last and (seen := one.value(run, record)) is not None:
                ranges[record["step"]].append(seen)
    values = []
    for step, of_runs in sorted(ranges.items()):
        middles, lows, highs = zip(*of_runs, strict=True)
        values.append(Value(step, fmean(middles), min(lows), max(highs)))
    return values


def of_metric(runs: Sequence[RunFiles], metric: str, names: Sequence[str], width: float, height: float) -> Chart:
    """Return a chart of one metric, or of the held-out result. `names` replaces the names of its curves, if given."""
    groups = groups_of(runs)
    if names and len(names) != len(groups):
        needed = "; ".join(group.name for group in groups)
        raise ConfigError(f"--names {','.join(names)}", f"the curves are: {needed}", "Give each of them one name")
    groups = [Group(name, group.runs) for name, group in zip(names, groups, strict=True)] if names else groups
    is_held_out, measure = metric == HELD_OUT, runs[0].measure
    drawn = chart(metric, groups, [Series(metric, f"{metric}/{measure.name}" if is_held_out else metric, is_held_out)])
    if not drawn.curves:
        logged = chain.from_iterable(line for run in runs for line in run.metrics)
        known = [one for one in dict.fromkeys([HELD_OUT, *logged]) if one != metric]
        named = ", ".join(one for one in known if not one.startswith(("time/", "memory/")))
        all_known = f"Known: {named}; time/PHASE and memory/PHASE, or time/* and memory/*"
        nearest = did_you_mean(metric, known).strip()
        raise ConfigError(f"--metric {metric}", "no run has logged it", nearest or all_known)
    title = f"held-out {measure.name}, 95 %" if is_held_out else OF_ALL_PHASES.get(metric, metric)
    is_share = f"{measure.name if is_held_out else metric}/".startswith(f"{PERCENT}/")
    return replace(drawn, title=title, percent=is_share, legend=True, width=width, height=height)


def files(runs: Sequence[RunFiles]) -> dict[str, bytes]:
    """Return the content of each file by its name. With several runs, a legend at the top names their colours."""
    groups = groups_of(runs)
    return {f"{name}.svg": _arranged(groups, charts_of(groups, name), name).encode() for name in CHARTS}


def _arranged(groups: Sequence[Group], charts: Sequence[Chart], title: str) -> Html:
    """Return charts in rows under the names of the runs."""
    top = GAP + LINE * len(groups)
    colours = ["currentColor"] if len(groups) == 1 else [colour_of(number) for number in range(len(groups))]
    marks = [
        label(GAP, GAP + LINE * (number + 0.6), visible(group.name), colours[number])
        for number, group in enumerate(groups)
    ]
    for number, one in enumerate(charts):
        row, column = divmod(number, COLUMNS)
        x, y = GAP + column * (WIDTH + GAP), top + row * (HEIGHT + GAP)
        marks.append(tag("g", *one.marks(), transform=f"translate({x:g},{y:g})"))
    rows = -(-len(charts) // COLUMNS)
    return svg(marks, GAP + COLUMNS * (WIDTH + GAP), top + rows * (HEIGHT + GAP), title, alone=True)
