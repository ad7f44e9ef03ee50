"""Whether the models of a study know the held-out problems by heart: the same problems are asked with new numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from trainer.config.study import BASE
from trainer.estimates import effect, is_enough
from trainer.run_folder.reader import RunFiles

FOLDER = "renumbered"  # of a run: its answers to the problems with new numbers


def gaps(arms: Mapping[str, Iterable[RunFiles]], lenient: bool) -> list[dict[str, Any]]:
    """Return for each arm how many of the old problems it solves, and how many of those with new numbers."""
    found = []
    for arm, runs in arms.items():
        pairs = [both for run in runs if (both := _pairs(run, arm, lenient))]
        if not pairs:
            continue
        table = [[float(old) - float(new) for old, new in both.values()] for both in pairs]
        old, new = (fmean(one[place] for both in pairs for one in both.values()) for place in (0, 1))
        gap = {"arm": arm, "seeds": len(pairs), "problems": len(table[0]), "old": old, "new": new}
        if is_enough(table):
            gap |= dict(zip(("low", "high"), effect(table).interval, strict=True))
        found.append(gap)
    return found


def _pairs(run: RunFiles, arm: str, lenient: bool) -> Mapping[str, tuple[bool, bool]]:
    """Return by the number of a problem whether a model solved the old one, and the new one."""
    kind = "correct_lenient" if lenient else "correct_strict"
    renumbered = RunFiles(run.folder / FOLDER, run.settings)
    old, new = (
        {one["problem"].split("/")[-1]: one[kind] for one in files.greedy.get(model, {}).values()}
        for files, model in (
            (run.before_training, "base") if arm == BASE else (run, "trained"),
            (renumbered, "base" if arm == BASE else "adapter"),
        )
    )
    return {number: (old[number], solved) for number, solved in new.items() if number in old}
