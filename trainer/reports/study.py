"""The results of a study, from the folders of its runs. `study.json` has all of them.

Accuracies and rewards are those of the greedy answers to the held-out problems, which are the same for every run.
`trainer/stats.py` has the statistics.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean
from typing import Any

from trainer.config.study import BASE, SUPERVISED, Study, StudyRun
from trainer.errors import DataError
from trainer.run_folder import changed_settings, layout
from trainer.run_folder.journal import VERDICT
from trainer.run_folder.reader import RunFiles, read_run, seconds_of
from trainer.stats import SIGNIFICANT, Table, corrected, effect, share_reached
from trainer.watch.measure import LENIENT, REWARD, STRICT, Measure

RENUMBERED = "renumbered"  # folder inside a run folder, with the answers to the problems with new numbers
COSTS = ("samples", "tokens", "seconds")
KINDS = {"strict": STRICT, "lenient": LENIENT}
LEAST_SEEDS = 3  # fewer seeds say too little about the variance over seeds
EQUAL = 0.01  # costs that differ by a smaller share count as equal
BETTER, WORSE, CANNOT_TELL = "better", "worse", "cannot tell"


@dataclass(frozen=True)
class Collected:
    """The runs of a study that have ended, by arm and seed, and the names of the others."""

    study: Study
    runs: Mapping[str, Mapping[int, RunFiles]]
    missing: Sequence[str]

    @cached_property
    def problems(self) -> list[tuple[str, ...]]:
        """The held-out problems that have a value in every run, by question and gold answer. Raise DataError if a run
        was asked other ones."""
        models = [both for run in self._all for both in ((run, "trained"), (run.before_training, "base"))]
        ((first, problems), *others) = [(run.folder, run.greedy.get(model, {})) for run, model in models]
        for folder, answered in others:
            if answered.keys() != problems.keys():
                reason = f"it answers {len(answered)} held-out problems, and {first} {len(problems)}, or other ones"
                remedy = "Give every arm the same eval.problems and held-out problems, and delete the folder if its "
                remedy += "file is damaged; the study repeats the run"
                raise DataError(f"{folder}/eval_answers.jsonl", reason, remedy)
        values = [run.worth(self.measure, model) for run, model in models]
        if not (kept := [problem for problem in problems if all(problem in one for one in values)]):
            reason = f"no held-out problem has {self.measure.of_answer} in all of its runs"
            raise DataError(self.study.folder, reason, "Delete the folders of runs without it; the study repeats them")
        return kept

    @property
    def measure(self) -> Measure:
        """The measure of the first arm: the accuracy in the format that is paid, or the reward."""
        return self._all[0].measure

    @property
    def kinds(self) -> Mapping[str, Measure]:
        """The measures that are shown, by their names in `study.json`."""
        return {REWARD.name: REWARD} if self.measure.is_reward else KINDS

    @cached_property
    def span(self) -> float:
        """The difference between the least and the most that an answer is worth: 1, or that of all rewards."""
        arms = [BASE, *self.runs] if self.measure.is_reward else []
        values = [value for arm in arms for seed in self.seeds(arm) for value in self.worth(arm, seed, self.measure)]
        return max(values, default=1.0) - min(values, default=0.0) or 1.0

    @property
    def _all(self) -> list[RunFiles]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    def worth(self, arm: str, seed: int, measure: Measure) -> list[float]:
        """Return the reward of an arm with a seed for each problem, or 1.0 if it solves it, else 0.0. The base is that
        of the first arm."""
        run = self.seeds(arm)[seed]
        answered = run.before_training.worth(measure, "base") if arm == BASE else run.worth(measure)
        return [float(answered[problem]) for problem in self.problems]

    def differences(self, arm: str, against: str, measure: Measure) -> Table:
        """Return the differences of each problem, in a row for each seed that both arms have."""
        seeds = [seed for seed in self.seeds(arm) if seed in self.seeds(against)]
        pairs = ((self.worth(arm, seed, measure), self.worth(against, seed, measure)) for seed in seeds)
        return [[a - b for a, b in zip(*pair, strict=True)] for pair in pairs]

    def seeds(self, arm: str) -> Mapping[int, RunFiles]:
        return self.runs.get(self.study.first if arm == BASE else arm, {})

    def means(self, arm: str, measure: Measure) -> list[float]:
        return [fmean(self.worth(arm, seed, measure)) for seed in self.seeds(arm)]


def collect(study: Study) -> Collected:
    """Read the runs that have ended. Raise DataError if the settings of one differ from the file of the study."""
    by_arm: dict[str, dict[int, RunFiles]] = {arm: {} for arm in study.arms}
    missing = []
    for run in study.runs():
        if (files := ended(study, run)) is None:
            missing.append(run.name)
        else:
            by_arm[run.arm][run.seed] = files
    found = [files for runs in by_arm.values() for files in runs.values()]
    for one in found if found and found[0].measure.is_reward else ():
        if one.code != found[0].code:
            reason = f"its reward or task has other code than {found[0].folder}"
            raise DataError(one.folder, reason, "Delete the folders that were made with the old code")
    return Collected(study, {arm: runs for arm, runs in by_arm.items() if runs}, missing)


def ended(study: Study, run: StudyRun) -> RunFiles | None:
    """Return the files of a run that has ended, or None. Raise DataError if its settings are not those of the study."""
    folder = study.folder / run.name
    has_saved = any(map(layout.has_saved, (folder, folder / "warmup")))
    if not (folder / "config.yaml").is_file() or not (has_saved or (folder / VERDICT).is_file()):
        return None  # it starts again, with the settings that the study has now
    ignored = changed_settings.NO_EFFECT
    if run.arm == SUPERVISED:  # its length follows from the first arm
        ignored = ignored | {"run.steps", "warmup.steps"}
    config, warmup = study.config(run), folder / "warmup"
    differences = changed_settings.differences(folder, config)
    if differences and (warmup / "config.yaml").is_file() and config.warmup.steps:  # after it, a run has other settings
        differences = changed_settings.differences(warmup, config.warmed_up_in(warmup))
        differences += changed_settings.differences(folder, config.after_warmup(warmup))
    if changes := [str(one) for one in differences if one.key not in ignored]:
        remedy = f"Restore them, rename the arm or {study.path.name}, or delete this folder"
        raise DataError(folder, f"it was made with other settings than the study has now: {', '.join(changes)}", remedy)
    files = read_run(folder)
    if files.has_ended and not files.metrics:
        raise DataError(f"{folder}/metrics.jsonl", "it is empty", "Delete this folder; the study repeats the run")
    return files if files.has_ended else None


def summary(collected: Collected) -> dict[str, Any]:
    """Return the content of `study.json`."""
    study = collected.study
    judged = [*comparisons(collected)]
    arms: dict[str, dict[str, Any]] = {}
    for arm in [BASE, *collected.runs]:
        costs = [totals(run) for run in collected.runs.get(arm, {}).values()]
        means = {kind: collected.means(arm, measure) for kind, measure in collected.kinds.items()}
        arms[arm] = {"settings": study.arms.get(arm, {}), **means}
        arms[arm] |= {name: fmean(one[name] for one in costs) for name in COSTS if costs}
    runs = [(arm, seed, run) for arm, seeds in collected.runs.items() for seed, run in seeds.items()]
    return {
        "study": study.name,
        "first": study.first,
        "controls": list(study.file.controls),
        "missing": list(collected.missing),
        "paid": next(kind for kind, measure in collected.kinds.items() if measure == collected.measure),
        "span": collected.span,
        "problems": len(collected.problems),
        "made_with": next(iter(collected.runs[study.first].values())).made_with,
        "arms": arms,
        "comparisons": judged,
        "shares": [*shares(collected, judged)],
        "equal": equal(collected),
        "gaps": [*gaps({arm: collected.seeds(arm).values() for arm in arms}, collected.measure)],
        "answers": {arm: _answers(collected, arm) for arm in arms},
        "runs": [{"arm": arm, "seed": seed, "curve": _points(run, collected)} for arm, seed, run in runs],
    }


def comparisons(collected: Collected) -> Iterator[dict[str, Any]]:
    """Compare each arm with the untrained base and with the first arm. Holm's correction is over all comparisons."""
    first, paid = collected.study.first, collected.measure
    pairs = [(arm, BASE) for arm in collected.runs]
    pairs += [(arm, first) for arm in collected.runs if arm != first]
    tables = {pair: table for pair in pairs if (table := collected.differences(*pair, paid))}
    judged = {pair: effect(table, collected.span) for pair, table in tables.items() if is_enough(table)}
    ps = dict(zip(judged, corrected([one.p for one in judged.values()]), strict=True))
    for pair, table in tables.items():
        one: dict[str, Any] = {"arm": pair[0], "against": pair[1], "seeds": len(table)}
        means = {"difference": table} | {kind: collected.differences(*pair, of) for kind, of in collected.kinds.items()}
        one |= {name: fmean(map(fmean, values)) for name, values in means.items()}
        if pair in judged:
            value, p, (low, high) = judged[pair].value, ps[pair], judged[pair].interval
            one |= {"low": low, "high": high, "p": judged[pair].p, "p_holm": p}
            one["detectable"] = judged[pair].detectable(len(judged))
            one["verdict"] = CANNOT_TELL if p >= SIGNIFICANT else BETTER if value > 0 else WORSE
        yield one


def shares(collected: Collected, comparisons: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the share of the first arm's gain over the base that each control reaches, if there is a gain."""
    first, paid = collected.study.first, collected.measure
    if not any(one["arm"] == first and one["against"] == BASE and one.get("verdict") == BETTER for one in comparisons):
        return
    gain = collected.differences(first, BASE, paid)
    for control in collected.study.file.controls:
        table = collected.differences(control, BASE, paid)
        share = share_reached(table, gain, collected.span) if len(table) == len(gain) else None
        yield {"control": control, **dict(zip(("share", "low", "high"), share or (), strict=bool(share)))}


def gaps(arms: Mapping[str, Iterable[RunFiles]], measure: Measure) -> Iterator[dict[str, Any]]:
    """Yield for each arm its accuracy on the old problems and on those with new numbers."""
    for arm, runs in arms.items():
        pairs = [both for run in runs if (both := _pairs(run, arm, measure.of_answer))]
        if not pairs:
            continue
        table = [[float(old) - float(new) for old, new in both.values()] for both in pairs]
        old, new = (fmean(one[place] for both in pairs for one in both.values()) for place in (0, 1))
        gap = {"arm": arm, "seeds": len(pairs), "problems": len(table[0]), "old": old, "new": new}
        if is_enough(table):
            gap |= dict(zip(("low", "high"), effect(table).interval, strict=True))
        yield gap


def _pairs(run: RunFiles, arm: str, kind: str) -> Mapping[str, tuple[bool, bool]]:
    """Return whether a model solved the old and the new version of a problem, by the number of the problem."""
    renumbered = RunFiles(run.folder / RENUMBERED, run.settings)
    before = run.before_training.greedy.get("base", {}) if arm == BASE else run.trained
    after = renumbered.greedy.get("base" if arm == BASE else "adapter", {})
    old, new = ({one["problem"].split("/")[-1]: one[kind] for one in of.values()} for of in (before, after))
    return {number: (old[number], solved) for number, solved in new.items() if number in old}


# ---------------------------------------------------------------------------------------------- the costs of the arms


def totals(run: RunFiles) -> dict[str, float]:
    """Return the samples, the tokens and the seconds of training of a whole run."""
    *_, (cost, _) = curve(run)
    return cost


def curve(run: RunFiles) -> Iterator[tuple[dict[str, float], Mapping[str, float]]]:
    """Yield the costs so far, including a warm-up, and the line of metrics.jsonl at each evaluation and at the end."""
    spent, first = dict.fromkeys(COSTS, 0.0), run.before_training
    for files in [run] if first is run else [first, run]:
        for line in files.metrics:
            if "groups" in line:
                samples = line["groups"] * files.settings["rollout.group_size"]
                tokens = samples * line["length"]
            else:  # a step of a warm-up, or the evaluation of the base
                samples, tokens = files.settings["warmup.problems"] * ("tokens" in line), line.get("tokens", 0.0)
            for name, more in zip(COSTS, (samples, tokens, seconds_of(line)), strict=True):
                spent[name] += more
            if files.folder == run.folder and "eval/problems" in line:
                yield {**spent}, line
    if "eval/problems" not in line:
        yield {**spent}, line


def equal(collected: Collected) -> dict[str, Any]:
    """Return for each kind of cost whether all arms have spent the same, and the accuracy or reward of each arm at the
    cost of the cheapest one, interpolated between two evaluations."""
    name = collected.measure.logged
    curves = {
        arm: [[(cost, line[name]) for cost, line in curve(run) if name in line] for run in runs.values()]
        for arm, runs in collected.runs.items()
    }
    found = {}
    for kind in COSTS:
        spent = {arm: fmean(one[-1][0][kind] for one in of_arm) for arm, of_arm in curves.items()}
        least, most = min(spent.values()), max(spent.values())
        at: dict[str, float | None] = {}
        for arm, of_arm in curves.items():
            reached = [right for one in of_arm if (right := _at(least, kind, one)) is not None]
            at[arm] = fmean(reached) if len(reached) == len(of_arm) else None
        found[kind] = {"is_equal": most - least <= EQUAL * most, "budget": least, collected.measure.name: at}
    return found


def _at(budget: float, kind: str, points: Sequence[tuple[Mapping[str, float], float]]) -> float | None:
    """Return the accuracy or reward at a cost, or None if the first evaluation came later."""
    if budget < points[0][0][kind]:
        return None
    for (before, low), (after, high) in pairwise(points):
        if before[kind] <= budget <= after[kind]:
            width = after[kind] - before[kind]
            return low + (high - low) * ((budget - before[kind]) / width if width else 1.0)
    return points[-1][1]


def _answers(collected: Collected, arm: str) -> dict[str, list[str] | list[list[float]]]:
    """Return for each seed the rewards, or a text with 1 for each solved problem and 0 for the others."""
    seeds, kinds = collected.seeds(arm), collected.kinds
    answers = {kind: [collected.worth(arm, seed, measure) for seed in seeds] for kind, measure in kinds.items()}
    if collected.measure.is_reward:
        return {**answers}
    return {kind: ["".join(f"{right:.0f}" for right in one) for one in found] for kind, found in answers.items()}


def _points(run: RunFiles, collected: Collected) -> list[dict[str, float]]:
    kinds, lines = collected.kinds, ((cost, line) for cost, line in curve(run) if collected.measure.logged in line)
    return [
        {"step": line["step"], **cost, **{kind: line[measure.logged] for kind, measure in kinds.items()}}
        for cost, line in lines
    ]


def is_enough(differences_SP: Table) -> bool:
    """Return True if there are enough seeds and problems to generalise to others."""
    return len(differences_SP) >= LEAST_SEEDS and len(differences_SP[0]) > 1
