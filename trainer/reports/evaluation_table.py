"""The numbers of eval.json as the rows of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Evaluations = Sequence[Mapping[str, Any]]


def rows(evaluations: Evaluations) -> list[list[object]]:
    """Return a row for each number, with a column for each model."""
    found = {
        "correct": [percent(one["accuracy"], one["interval"]) for one in evaluations],
        "in any format": [percent(one["lenient_accuracy"], one["lenient_interval"]) for one in evaluations],
        "wrong answer": [f"{one['category_shares']['wrong answer']:.1%}" for one in evaluations],
        "no answer found": [f"{one['category_shares']['no answer']:.1%}" for one in evaluations],
        "cut off": [f"{one['truncated']:.1%}" for one in evaluations],
        "mean tokens": [f"{one['mean_tokens']:.1f}" for one in evaluations],
    }
    return [[name, *cells] for name, cells in (found | _sampled(evaluations)).items()]


def _sampled(evaluations: Evaluations) -> dict[str, list[str]]:
    """Return avg@k, maj@k and pass@k, where answers were sampled too."""
    sampled = [one.get("sampled", {}) for one in evaluations]
    names = [name for name in sampled[0] if "@" in name]
    return {name: [percent(*one[name].values()) if name in one else "" for one in sampled] for name in names}


def percent(value: float, interval: Sequence[float]) -> str:
    """Return a share with its interval: `62.1% (55.0-68.7)`."""
    return f"{value:.1%} ({100 * interval[0]:.1f}-{100 * interval[1]:.1f})"
