"""A study as tables on the screen, and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from trainer.config.study import BASE
from trainer.estimates import FOUND, LEAST_SEEDS
from trainer.reports.chart import differences, svg
from trainer.reports.curves import Group
from trainer.reports.markup import Html, page, table, tag
from trainer.reports.report import charts, section
from trainer.reports.study import BETTER, CANNOT_TELL, COSTS, WORSE, Collected

Found = Mapping[str, Any]
SOME = 10  # names of runs in a sentence
SHOWN = {"samples": "{:,.0f} samples", "tokens": "{:,.0f} tokens", "seconds": "{:,.0f} s"}


def screen(found: Found) -> Iterator[Table]:
    """Yield the tables of a study, for a screen."""
    for title, head, rows in tables(found):
        drawn = Table(title=title, box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for place, name in enumerate(head):
            drawn.add_column(name, justify="right" if place else "left", no_wrap=True)
        for row in rows:
            drawn.add_row(*row)
        yield drawn


def tables(found: Found) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield the title, head and rows of each table."""
    yield "Accuracy on held-out problems", ["arm", "seeds", "strict", "any format", "cost", "", ""], [*_arms(found)]
    head = ["", "points", "95 % interval", "p", "p (Holm)", "verdict"]
    for against in (BASE, found["first"]):
        rows = [_comparison(one) for one in found["comparisons"] if one["against"] == against]
        if rows:
            yield f"Against {'the untrained base' if against == BASE else against}", head, rows
    if found.get("gaps"):
        head = ["", "old numbers", "new numbers", "gap", "95 % interval"]
        yield f"The same {found['gaps'][0]['problems']} problems with new numbers", head, [*map(_gap, found["gaps"])]
    at = {kind: found["equal"][kind]["accuracy"] for kind in COSTS}
    rows = [
        [arm, *("" if at[kind][arm] is None else f"{at[kind][arm]:.1%}" for kind in COSTS)] for arm in _trained(found)
    ]
    budgets = [f"at {SHOWN[kind].format(found['equal'][kind]['budget'])}" for kind in COSTS]
    yield "Accuracy where every arm has spent as much", ["arm", *budgets], rows


def _trained(found: Found) -> list[str]:
    return [arm for arm in found["arms"] if arm != BASE]


def drawings(found: Found) -> Iterator[tuple[Sequence[Html], float, float, str]]:
    """Yield for each kind of comparison the marks, width, height and title of a chart."""
    for against in (BASE, found["first"]):
        judged = [one for one in found["comparisons"] if one["against"] == against and "verdict" in one]
        if judged:
            title = f"points against {'the untrained base' if against == BASE else against}, 95 % intervals"
            yield (*differences(title, judged, CANNOT_TELL), title)


def _arms(found: Found) -> Iterator[list[str]]:
    for arm, one in found["arms"].items():
        costs = [SHOWN[kind].format(one[kind]) if kind in one else "" for kind in COSTS]
        control = " (control)" if arm in found["controls"] else ""
        yield [f"{arm}{control}", str(len(one["strict"])), _spread(one["strict"]), _spread(one["lenient"]), *costs]


def _spread(values: Sequence[float]) -> str:
    """Return the mean over seeds, with the least and the most."""
    if max(values) - min(values) < 0.0005:
        return f"{fmean(values):.1%}"
    return f"{fmean(values):.1%} ({100 * min(values):.1f}-{100 * max(values):.1f})"


def _comparison(one: Found) -> list[str]:
    points = f"{100 * one['difference']:+.1f}"
    if "verdict" not in one:
        few = f"{one['seeds']} of at least {LEAST_SEEDS} seeds" if one["seeds"] < LEAST_SEEDS else "a single problem"
        return [one["arm"], points, "", "", "", f"not judged: {few}"]
    interval = f"{100 * one['low']:+.1f} to {100 * one['high']:+.1f}"
    return [one["arm"], points, interval, f"{one['p']:.2g}", f"{one['p_holm']:.2g}", one["verdict"]]


def _gap(one: Found) -> list[str]:
    interval = f"{100 * one['low']:+.1f} to {100 * one['high']:+.1f}" if "low" in one else ""
    return [one["arm"], f"{one['old']:.1%}", f"{one['new']:.1%}", f"{100 * (one['old'] - one['new']):+.1f}", interval]


def sentences(found: Found) -> Iterator[str]:
    """Yield what the study says, one sentence for each thing."""
    yield (
        f"{found['problems']} held-out problems, greedy answers; {found['paid']} answers are paid, so they decide. "
        "Intervals and tests are over seeds and problems; the tests are corrected for all comparisons, the intervals "
        "for none."
    )
    if missing := found.get("missing"):
        some = ", ".join(missing[:SOME]) + ", ..." * (len(missing) > SOME)
        yield f"Runs that have not ended are left out: {some}."
    for one in found["comparisons"]:
        if one["against"] == BASE and one["arm"] == found["first"] and "verdict" in one:
            yield _gain(one)
    yield from map(_share, found["shares"])
    for verdict in (BETTER, WORSE):
        others = [one for one in found["comparisons"] if one["against"] != BASE and one.get("verdict") == verdict]
        if others:
            listed = ", ".join(f"{one['arm']} ({100 * one['difference']:+.1f})" for one in others)
            yield f"{verdict.capitalize()} than {found['first']}, in points: {listed}."
    for one in found["comparisons"]:
        is_arm = one["arm"] not in found["controls"]
        if is_arm and one["against"] == found["first"] and one.get("verdict") == CANNOT_TELL:
            yield (
                f"{one['arm']} and {found['first']}: no difference was found. This study finds one of "
                f"{100 * one['detectable']:.1f} points with a probability of about {100 * FOUND:.0f} %."
            )
    yield from _contamination(found)
    yield from _costs(found)


def _contamination(found: Found) -> Iterator[str]:
    gaps = {one["arm"]: one for one in found.get("gaps", [])}
    if BASE not in gaps or found["first"] not in gaps:
        return
    base, first = gaps[BASE], gaps[found["first"]]
    old, new = (100 * (first[kind] - base[kind]) for kind in ("old", "new"))
    yield f"The gain of {found['first']} is {old:+.1f} points on the old problems, and {new:+.1f} with new numbers."
    if base.get("low", 0.0) > 0:
        yield "The base solves more of the old ones: it may have seen them, or the new numbers are harder."
    elif "low" in base:
        yield "The base was not found to solve more of the old ones: no sign of contamination."


def _gain(one: Found) -> str:
    strict, lenient = 100 * one["strict"], 100 * one["lenient"]
    found = f"{one['arm']} against the untrained base: {one['verdict']}, {strict:+.1f} points strict"
    if one["verdict"] != BETTER or not 0 <= lenient < strict:
        return f"{found}, {lenient:+.1f} where an answer may have any format."
    return f"{found}. Where an answer may have any format, {lenient:+.1f} of them remain; the rest is format."


def _share(one: Found) -> str:
    if "share" not in one:
        return f"The share of this gain that the control {one['control']} reaches cannot be told."
    interval = f"({100 * one['low']:.0f} to {100 * one['high']:.0f} %)"
    if one["low"] <= 0:
        return f"The control {one['control']} was not found to reach any of this gain {interval}."
    return f"The control {one['control']} reaches {100 * one['share']:.0f} % of this gain {interval}."


def _costs(found: Found) -> Iterator[str]:
    if len(_trained(found)) == 1:
        return
    same = [kind for kind in COSTS if found["equal"][kind]["is_equal"]]
    others = [kind for kind in COSTS if kind not in same]
    if same:
        yield f"All arms have spent the same {' and '.join(same)}."
    if others:
        yield (
            f"The arms differ in cost: {', '.join(others)}. The last table has the accuracy of each arm when it "
            "had spent what the most frugal one did in all."
        )


def study_page(found: Found, collected: Collected) -> str:
    """Return the page of a study."""
    return page(f"{found['study']}: Octet", *_sections(found, collected))


def _sections(found: Found, collected: Collected) -> Iterator[Html]:
    yield tag("h1", found["study"])
    for sentence in sentences(found):
        yield tag("p", sentence)
    for title, head, rows in tables(found):
        yield from section(title, table(head, rows, "numbers"))
    yield from section("Differences in points", *(tag("figure", svg(*drawn)) for drawn in drawings(found)))
    groups = [Group(arm, [*runs.values()]) for arm, runs in collected.runs.items()]
    yield from section("Curves", charts(groups))
    settings = [[arm, tag("code", str(one["settings"]))] for arm, one in found["arms"].items() if one["settings"]]
    yield from section("Settings of the arms", table(["arm", "settings"], settings))
    yield from section("How it was made", *(tag("p", line) for line in found["made_with"]))
