"""What a study has come to, from the folders of its runs: `study.json` holds all of it.

The accuracy is that of the greedy answers to the held-out problems that every run was asked. `reports/effects.py` has
the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

from trainer.config.study import BASE, SUPERVISED, Study, StudyRun
from trainer.errors import DataError
from trainer.estimates import SIGNIFICANT
from trainer.reports.contamination import gaps
from trainer.reports.effects import LEAST_SEEDS, Effect, Table, corrected, effect, share_reached
from trainer.reports.run_files import RunFiles, phases, read_run
from trainer.run_folder import earlier

COSTS = ("samples", "tokens", "seconds")
EQUAL = 0.01  # costs that differ by less are equal
BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class Collected:
    """The runs of a study that have ended, by arm and seed."""

    study: Study
    runs: Mapping[str, Mapping[int, RunFiles]]

    @cached_property
    def problems(self) -> list[tuple[str, str]]:
        """The held-out problems that every run was asked, by question and gold answer."""
        first, *others = (run.answered("trained", lenient=False) for run in self._all)
        found = [problem for problem in first if all(problem in other for other in others)]
        if not found:
            raise DataError(f"{self.study.folder}: its runs have no held-out problem in common. Set eval.problems.")
        return found

    @property
    def pays_lenient(self) -> bool:
        return self._all[0].pays_lenient

    @property
    def _all(self) -> list[RunFiles]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    def correct(self, arm: str, seed: int, lenient: bool) -> list[float]:
        """Return 1.0 for each problem that an arm solves with a seed; the base is that of the first arm's run."""
        run = self.runs[self.study.first if arm == BASE else arm][seed]
        answered = run.answered("base" if arm == BASE else "trained", lenient)
        return [float(answered[problem]) for problem in self.problems]

    def differences(self, arm: str, against: str, lenient: bool) -> Table:
        """Return a row for each seed that both arms have."""
        seeds = [seed for seed in self.seeds(arm) if seed in self.seeds(against)]
        pairs = ((self.correct(arm, seed, lenient), self.correct(against, seed, lenient)) for seed in seeds)
        return [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]

    def seeds(self, arm: str) -> Mapping[int, RunFiles]:
        return self.runs.get(self.study.first if arm == BASE else arm, {})

    def accuracies(self, arm: str, lenient: bool) -> list[float]:
        return [fmean(self.correct(arm, seed, lenient)) for seed in self.seeds(arm)]


def collect(study: Study) -> Collected:
    """Read the runs that have ended. Raise DataError if one has other settings than the file says."""
    found: dict[str, dict[int, RunFiles]] = {}
    for run in study.runs():
        if (files := ended(study, run)) is not None:
            found.setdefault(run.arm, {})[run.seed] = files
    return Collected(study, found)


def ended(study: Study, run: StudyRun) -> RunFiles | None:
    """Return the files of a run that has ended, or None. Raise DataError if its settings are not those of the study."""
    folder = study.folder / run.name
    if not (folder / "config.yaml").is_file():
        return None
    own = {"run.steps", "warmup.steps"} if run.arm == SUPERVISED else set()  # they follow from the first arm
    changes = [one for one in earlier.differences(folder, study.config(run)) if one.key not in earlier.NO_EFFECT | own]
    if changes:
        raise DataError(
            f"{folder}: it was made with other settings than {study.path} has: {', '.join(map(str, changes))}. Delete "
            "this folder, or name the arm anew."
        )
    files = read_run(folder)
    return files if files.has_ended else None


def summary(collected: Collected) -> dict[str, Any]:
    """Return what `study.json` holds."""
    study = collected.study
    costs = {arm: [totals(run) for run in runs.values()] for arm, runs in collected.runs.items()}
    return {
        "study": study.name,
        "first": study.first,
        "controls": list(study.file.controls),
        "paid": "lenient" if collected.pays_lenient else "strict",
        "problems": len(collected.problems),
        "made_with": next(iter(collected.runs[study.first].values())).made_with,
        "arms": {arm: _arm(collected, arm, costs.get(arm, [])) for arm in [BASE, *collected.runs]},
        "comparisons": comparisons(collected),
        "shares": shares(collected),
        "equal": equal(collected),
        "gaps": gaps({arm: collected.seeds(arm).values() for arm in [BASE, *collected.runs]}, collected.pays_lenient),
        "answers": {arm: _answers(collected, arm) for arm in [BASE, *collected.runs]},
        "runs": [_run(arm, seed, run) for arm, seeds in collected.runs.items() for seed, run in seeds.items()],
    }


def _arm(collected: Collected, arm: str, costs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    strict, lenient = (collected.accuracies(arm, kind) for kind in (False, True))
    found: dict[str, Any] = {"settings": collected.study.arms.get(arm, {}), "strict": strict, "lenient": lenient}
    return found | {name: fmean(one[name] for one in costs) for name in COSTS if costs}


def comparisons(collected: Collected) -> list[dict[str, Any]]:
    """Compare each arm with the untrained base, and with the first arm. Holm's correction is over all of them."""
    first, paid = collected.study.first, collected.pays_lenient
    pairs = [(arm, BASE) for arm in collected.runs]
    pairs += [(arm, first) for arm in collected.runs if arm != first]
    tables = {pair: collected.differences(*pair, paid) for pair in pairs}
    judged = {pair: effect(table) for pair, table in tables.items() if len(table) >= LEAST_SEEDS}
    ps = dict(zip(judged, corrected([one.p for one in judged.values()]), strict=True))
    return [
        {
            "arm": pair[0],
            "against": pair[1],
            "seeds": len(table),
            "difference": _mean(table),
            "strict": _mean(collected.differences(*pair, lenient=False)),
            "lenient": _mean(collected.differences(*pair, lenient=True)),
            **(_judged(judged[pair], ps[pair]) if pair in judged else {}),
        }
        for pair, table in tables.items()
        if table
    ]


def _mean(table: Table) -> float:
    return fmean(map(fmean, table))


def _judged(found: Effect, p: float) -> dict[str, Any]:
    verdict = CANNOT_TELL if p >= SIGNIFICANT else BETTER if found.value > 0 else WORSE
    low, high = found.interval
    return {"low": low, "high": high, "p": found.p, "p_holm": p, "detectable": found.detectable, "verdict": verdict}


def shares(collected: Collected) -> list[dict[str, Any]]:
    """Return which share of the first arm's gain over the base each control reaches, if there is a gain."""
    first, paid = collected.study.first, collected.pays_lenient
    gain = collected.differences(first, BASE, paid)
    found = effect(gain) if len(gain) >= LEAST_SEEDS else None
    if found is None or found.p >= SIGNIFICANT or found.value <= 0:
        return []
    reached = []
    for control in collected.study.file.controls:
        table = collected.differences(control, BASE, paid)
        share = share_reached(table, gain) if len(table) == len(gain) else None
        if share:
            reached.append({"control": control, **dict(zip(("share", "low", "high"), share, strict=True))})
    return reached


# ---------------------------------------------------------------------------------------------- what the arms have cost


def totals(run: RunFiles) -> dict[str, float]:
    """Return the samples, tokens and seconds of training of a whole run."""
    *_, (cost, _) = curve(run)
    return cost


def curve(run: RunFiles) -> Iterator[tuple[dict[str, float], Mapping[str, float]]]:
    """Yield what had been spent at each evaluation, and at the end, with the line of metrics.jsonl. A warm-up of the
    same run counts."""
    spent = dict.fromkeys(COSTS, 0.0)
    parts = [folder for folder in (run.folder / "warmup", run.folder) if (folder / "config.yaml").is_file()]
    for files in map(read_run, parts):
        for line in files.metrics:
            _spend(spent, files, line)
            if files.folder == run.folder and "eval/accuracy" in line:
                yield {**spent}, line
    yield {**spent}, line


def _spend(spent: dict[str, float], run: RunFiles, line: Mapping[str, float]) -> None:
    """Add what one step has cost."""
    if "groups" in line:
        samples = line["groups"] * run.settings["rollout.group_size"]
        spent["samples"] += samples
        spent["tokens"] += samples * line["length"]
    elif "tokens" in line:
        spent["samples"] += run.settings["warmup.problems"]
        spent["tokens"] += line["tokens"]
    spent["seconds"] += sum(line.get(f"time/{name}", 0.0) for name in phases([line]))


def equal(collected: Collected) -> dict[str, Any]:
    """Return for each kind of cost whether all arms have spent as much, and the accuracy that each had when it had
    spent what the most frugal one did. Between two evaluations the accuracy is interpolated."""
    name = "eval/lenient" if collected.pays_lenient else "eval/accuracy"
    curves = {
        arm: [[(cost, line[name]) for cost, line in curve(run) if name in line] for run in runs.values()]
        for arm, runs in collected.runs.items()
    }
    found = {}
    for kind in COSTS:
        spent = {arm: fmean(one[-1][0][kind] for one in of_arm) for arm, of_arm in curves.items()}
        least, most = min(spent.values()), max(spent.values())
        at = {arm: fmean(_at(least, kind, one) for one in of_arm) for arm, of_arm in curves.items()}
        found[kind] = {"is_equal": most - least <= EQUAL * most, "budget": least, "accuracy": at}
    return found


def _at(budget: float, kind: str, points: Sequence[tuple[Mapping[str, float], float]]) -> float:
    for (before, low), (after, high) in pairwise(points):
        if before[kind] <= budget <= after[kind]:
            width = after[kind] - before[kind]
            return low + (high - low) * ((budget - before[kind]) / width if width else 1.0)
    return points[-1][1]


def _answers(collected: Collected, arm: str) -> dict[str, list[str]]:
    """Return for each seed which problems were solved, as a text of ones and zeros."""
    return {
        kind: ["".join(f"{right:.0f}" for right in collected.correct(arm, seed, kind == "lenient")) for seed in seeds]
        for kind in ("strict", "lenient")
        for seeds in [collected.seeds(arm)]
    }


def _run(arm: str, seed: int, run: RunFiles) -> dict[str, Any]:
    names = {"eval/accuracy": "strict", "eval/lenient": "lenient"}
    points = [
        {"step": line["step"], **cost, **{short: line[name] for name, short in names.items()}}
        for cost, line in curve(run)
        if "eval/accuracy" in line
    ]
    return {"arm": arm, "seed": seed, "curve": points}
