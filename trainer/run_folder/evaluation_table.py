"""The numbers of eval.json as the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Parts = Sequence[Mapping[str, Any]]


def rows(evaluations: Parts, comparisons: Parts) -> list[list[str]]:
    """Return a row for each number, with a column for each model."""
    first, parts = evaluations[0]["name"], evaluations[0].get("parts", {})
    found = {
        "correct": [percent(one["accuracy"], one["interval"]) for one in evaluations],
        **{f"  {name}": [percent(*one["parts"][name].values()) for one in evaluations] for name in parts},
        "in any format": [percent(one["lenient_accuracy"], one["lenient_interval"]) for one in evaluations],
        "wrong answer": [_category(one, "wrong answer") for one in evaluations],
        "no answer found": [_category(one, "no answer") for one in evaluations],
        "cut off": [f"{one['truncated']:.1%}" for one in evaluations],
        "mean tokens": [f"{one['mean_tokens']:.1f}" for one in evaluations],
    }
    if flips := [f"+{one['gained']}/-{one['lost']}" for one in comparisons if one["before"] == first]:
        found["gained/lost"] = ["", *flips]
    return [[name, *cells] for name, cells in (found | _sampled(evaluations)).items()]


def _category(described: Mapping[str, Any], name: str) -> str:
    return f"{described['categories'][name]} ({described['category_shares'][name]:.1%})"


def _sampled(evaluations: Parts) -> dict[str, list[str]]:
    """Return avg@k, maj@k and pass@k, and the spread over several trials, where answers were sampled too."""
    if not (sampled := [one["sampled"] for one in evaluations if "sampled" in one]):
        return {}
    names = [name for name in sampled[0] if "@" in name]
    found = {name.replace("lenient", "any format"): [percent(*one[name].values()) for one in sampled] for name in names}
    if sampled[0]["trials"] > 1:
        spread = [f"{one['mean']:.1%} ± {one['deviation']:.1%}" for one in sampled]
        found[f"mean of {sampled[0]['trials']} trials"] = spread
    return found


def percent(value: float, interval: Sequence[float]) -> str:
    """Return a share with its interval: `62.1% (55.0-68.7)`."""
    return f"{value:.1%} ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})"
