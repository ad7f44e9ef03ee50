"""What is plotted of runs. Runs that differ in their seed alone become one curve with a band."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from trainer.config.settings import fields
from trainer.reports.chart import Chart, Curve, Value, thinned
from trainer.run_folder.reader import NOT_COMPARED, RunFiles, differing, names_of, phases

Range = tuple[float, float, float]  # a value, and the lowest and highest around it
Looks = Callable[[Mapping[str, float]], "Range | None"]
LONGEST_NAME = 60
MOST_PHASES = 4


class Source(NamedTuple):
    name: str
    look: Looks
    dots: bool = False


class Group(NamedTuple):
    """A run, or several that differ in their seed alone."""

    name: str
    runs: Sequence[RunFiles]


def groups_of(runs: Sequence[RunFiles]) -> list[Group]:
    """Return the runs, those together that differ in their seed alone. If two have the same seed, each is alone."""
    found: dict[str, list[RunFiles]] = defaultdict(list)
    compared = [key for key in fields() if key not in NOT_COMPARED | {"run.seed"}]
    for run in runs:
        found[str([run.settings[key] for key in compared])].append(run)
    keys = [key for key in differing([run.settings for run in runs]) if key != "run.seed"]
    names = dict(zip((run.folder for run in runs), names_of(runs), strict=True))
    groups = [part for alike in found.values() for part in (_seeds(alike) or [[run] for run in alike])]
    return [Group(_name([names[run.folder] for run in group], group[0], keys), group) for group in groups]


def _seeds(runs: list[RunFiles]) -> list[list[RunFiles]]:
    """Return the runs as one group if no two of them have the same seed, else no group."""
    return [runs] if len({run.settings["run.seed"] for run in runs}) == len(runs) else []


def _name(names: Sequence[str], run: RunFiles, keys: Sequence[str]) -> str:
    """Return the names of the runs of a group, with the settings that tell it from the others, as many as fit."""
    seeds = f" ({len(names)} seeds)" if len(names) > 1 else ""
    told = [f"{key}={run.settings[key]}" for key in keys]
    shown = [one for at, one in enumerate(told) if not at or len(" ".join(told[: at + 1])) <= LONGEST_NAME]
    more = [f"and {len(told) - len(shown)} more"] if len(shown) < len(told) else []
    settings = f", {' '.join([*shown, *more])}" if told else ""
    return f"{', '.join(names)}{seeds}{settings}"


def main_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return the four that say whether a run learns."""
    first = groups[0].runs[0]
    accuracy = f"accuracy/{first.settings['reward.answer'] or 'strict'}"
    held_out = Source("held-out, 95 %", first.held_out, dots=True)
    return _drawn(
        chart("mean reward", groups, [Source("reward", plain("reward/mean"))]),
        chart("accuracy", groups, [Source("training", plain(accuracy)), held_out], percent=True),
        chart("loss", groups, [Source("loss", plain("loss"))]),
        chart(
            "reward, lowest to highest", groups, [Source("reward", between("reward/mean", "reward/min", "reward/max"))]
        ),
    )


def more_charts(groups: Sequence[Group]) -> list[Chart]:
    """Return what to look at if it does not."""
    records = [record for group in groups for run in group.runs for record in run.metrics]
    return _drawn(
        chart("entropy of a token", groups, [Source("entropy", plain("entropy"))]),
        chart("KL to the reference, a token", groups, [Source("KL", plain("kl"))]),
        chart("tokens of an answer", groups, [Source("length", plain("length"))]),
        chart("norm of the gradient", groups, [Source("norm", plain("grad_norm"))]),
        chart("seconds of a step", groups, _each(groups, phases(records), "time", sum)),
        chart("memory at its peak, GB", groups, _each(groups, phases(records, "memory"), "memory", max)),
    )


def _drawn(*charts: Chart) -> list[Chart]:
    """Leave out what these runs did not log, such as the KL to a reference that they do not have."""
    return [chart for chart in charts if chart.curves]


def plain(name: str) -> Looks:
    return lambda record: (record[name],) * 3 if name in record else None


def between(name: str, low: str, high: str) -> Looks:
    return lambda record: (record[name], record[low], record[high]) if low in record else None


def _each(
    groups: Sequence[Group], names: Sequence[str], kind: str, together: Callable[[Iterable[float]], float]
) -> list[Source]:
    """Return a source for each of the largest phases of one run, or for all phases together of several runs."""

    def whole(record: Mapping[str, float]) -> Range | None:
        found = [record[f"{kind}/{name}"] for name in names if f"{kind}/{name}" in record]
        return (together(found),) * 3 if found else None

    if len(groups) > 1 or kind == "memory":
        return [Source("all", whole)]
    records = [record for run in groups[0].runs for record in run.metrics]
    largest = sorted(names, key=lambda name: -sum(record.get(f"{kind}/{name}", 0.0) for record in records))
    return [Source(name, plain(f"{kind}/{name}")) for name in largest[:MOST_PHASES]]


def chart(title: str, groups: Sequence[Group], sources: Sequence[Source], percent: bool = False) -> Chart:
    """Return a chart: each run in its colour, or each source in its colour if there is one run."""
    alone = len(groups) == 1
    curves = [
        Curve(source.name if alone else _both(group, source, sources), values, which if alone else number, source.dots)
        for number, group in enumerate(groups)
        for which, source in enumerate(sources)
        if (values := thinned(_values(group, source)))
    ]
    dots = "" if alone else "".join(f" (dots: {source.name})" for source in sources if source.dots)
    return Chart(f"{title}{dots}", curves, percent, legend=alone)


def _both(group: Group, source: Source, sources: Sequence[Source]) -> str:
    return group.name if len(sources) == 1 else f"{group.name}, {source.name}"


def _values(group: Group, source: Source) -> list[Value]:
    """Return the mean over the runs of a group, and the range that holds all of them."""
    found: dict[int, list[Range]] = defaultdict(list)
    for run in group.runs:
        for record in run.metrics:
            if (seen := source.look(record)) is not None:
                found[record["step"]].append(seen)
    return [Value(step, *_together(seen)) for step, seen in sorted(found.items())]


def _together(seen: Sequence[Range]) -> Range:
    if len(seen) == 1:  # as in most groups
        return seen[0]
    middles, lows, highs = zip(*seen, strict=True)
    return fmean(middles), min(lows), max(highs)
