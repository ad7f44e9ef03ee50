"""The results of a study as tables on the screen, and as a page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import Environment

from trainer.config.read_yaml import written
from trainer.config.study import BASE
from trainer.reports.chart import differences, svg
from trainer.reports.curves import Group
from trainer.reports.markup import Html, table, tag
from trainer.reports.report import charts, section
from trainer.reports.study import CANNOT_TELL, COSTS, LEAST_SEEDS, Collected
from trainer.stats import FOUND
from trainer.watch.measure import REWARD, STRICT, Measure

Found = Mapping[str, Any]
SENTENCES = Path(__file__).with_name("study.txt")
SHOWN = {"samples": "{:,.0f} samples", "tokens": "{:,.0f} tokens", "seconds": "{:,.0f} s"}


def tables(found: Found) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, head and rows of each table."""
    measure, unit = _measured(found)
    kinds, name = ([REWARD.name], "Mean reward") if measure.is_reward else (["strict", "lenient"], "Accuracy")
    rows = []
    for arm, one in found["arms"].items():
        costs = [SHOWN[kind].format(one[kind]) if kind in one else "" for kind in COSTS]
        shown = f"{arm} (control)" if arm in found["controls"] else arm
        rows.append([shown, str(len(one[kinds[0]])), *(_spread(one[kind], measure) for kind in kinds), *costs])
    title = f"{name} on held-out problems, with the lowest and the highest seed"
    yield title, ["arm", "seeds", *("any format" if kind == "lenient" else kind for kind in kinds), *COSTS], rows
    head = ["", unit, "95 % interval", "p", "p (Holm)", "verdict"]
    for against in (BASE, found["first"]):
        rows = [_comparison(one, measure) for one in found["comparisons"] if one["against"] == against]
        if rows:
            yield f"Against {'the untrained base' if against == BASE else against}", head, rows
    if found.get("gaps"):
        head = ["", "old numbers", "new numbers", "gap", "95 % interval"]
        rows = []
        for one in found["gaps"]:
            interval = f"{100 * one['low']:+.1f} to {100 * one['high']:+.1f}" if "low" in one else ""
            shares = [f"{one['old']:.1%}", f"{one['new']:.1%}", f"{100 * (one['old'] - one['new']):+.1f}"]
            rows.append([one["arm"], *shares, interval])
        yield f"The same {found['gaps'][0]['problems']} problems with new numbers", head, rows
    at = {kind: found["equal"][kind][measure.name] for kind in COSTS}
    reached = {arm: [at[kind][arm] for kind in COSTS] for arm in found["arms"] if arm != BASE}
    rows = [[arm, *("" if one is None else measure.text(one) for one in of_arm)] for arm, of_arm in reached.items()]
    budgets = [f"at {SHOWN[kind].format(found['equal'][kind]['budget'])}" for kind in COSTS]
    yield f"{name} where every arm has spent the same", ["arm", *budgets], rows


def _measured(found: Found) -> tuple[Measure, str]:
    """Return what a study compares, and the unit of its differences."""
    return (REWARD, REWARD.name) if found["paid"] == REWARD.name else (STRICT, "points")


def drawings(found: Found) -> Iterator[tuple[Sequence[Html], float, float, str]]:
    """Yield for each kind of comparison the marks, width, height and title of a chart."""
    measure, unit = _measured(found)
    for against in (BASE, found["first"]):
        judged = [one for one in found["comparisons"] if one["against"] == against and "verdict" in one]
        if judged:
            title = f"{unit} against {'the untrained base' if against == BASE else against}, 95 % intervals"
            yield (*differences(title, judged, CANNOT_TELL, measure), title)


def _spread(values: Sequence[float], measure: Measure) -> str:
    """Return the mean over seeds, with the lowest and the highest value."""
    ends = min(values), max(values)
    return measure.text(fmean(values), ends if measure.text(ends[0]) != measure.text(ends[1]) else ())


def _comparison(one: Found, measure: Measure) -> list[str]:
    points = measure.signed(one["difference"])
    if "verdict" not in one:
        few = f"{one['seeds']} of at least {LEAST_SEEDS} seeds" if one["seeds"] < LEAST_SEEDS else "a single problem"
        return [one["arm"], points, "", "", "", f"not judged: {few}"]
    interval = f"{measure.signed(one['low'])} to {measure.signed(one['high'])}"
    return [one["arm"], points, interval, f"{one['p']:.2g}", f"{one['p_holm']:.2g}", one["verdict"]]


def sentences(found: Found) -> list[str]:
    """Return the conclusions of the study, each as a sentence."""
    gaps = {one["arm"]: one for one in found.get("gaps", [])}
    same = [kind for kind in COSTS if found["equal"][kind]["is_equal"]]
    is_exact = all(len({one[kind] for one in found["arms"].values() if kind in one}) == 1 for kind in same)
    measure, unit = _measured(found)
    text = Environment(trim_blocks=True, lstrip_blocks=True)
    text.filters |= {"points": measure.signed, "size": lambda value: measure.signed(value).lstrip("+")}
    text.filters |= {"percent": lambda value: f"{100 * value:.0f}"}
    values = {**found, "found": FOUND, "base_gap": gaps.get(BASE), "first_gap": gaps.get(found["first"])}
    values |= {"measure": measure.name, "unit": unit, "in_unit": "in reward" if measure.is_reward else unit}
    values |= {"same": same, "is_exact": is_exact, "others": [kind for kind in COSTS if kind not in same]}
    rendered = text.from_string(SENTENCES.read_text(encoding="utf-8")).render(values)
    return [line for line in rendered.splitlines() if line]


def sections(found: Found, collected: Collected) -> Iterator[Html]:
    """Yield the page of a study."""
    headline, *others = sentences(found)
    of_first = [one.get("verdict") for one in found["comparisons"] if one["arm"] == found["first"]]
    colour = of_first[0] if of_first and of_first[0] != CANNOT_TELL else ""
    yield tag("h1", found["study"])
    yield tag("div", tag("p", tag("strong", headline)), class_=f"verdict {colour or ''}".strip())
    yield from (tag("p", sentence) for sentence in others)
    for title, head, rows in tables(found):
        yield from section(title, table(head, rows, "numbers"))
    if figures := [tag("figure", svg(*drawn)) for drawn in drawings(found)]:
        yield from section(f"Differences in {_measured(found)[1]}", *figures)
    groups = [Group(arm, [*runs.values()]) for arm, runs in collected.runs.items()]
    yield from section("Curves", charts(groups))
    settings = [
        [arm, tag("code", " ".join(f"{key}={written(value)}" for key, value in one["settings"].items()))]
        for arm, one in found["arms"].items()
        if one["settings"]
    ]
    yield from section("Settings of the arms", table(["arm", "settings"], settings))
    yield from section("How it was made", *(tag("p", line) for line in found["made_with"]))
