"""Read the files in the folder of a live or finished run. Only config.yaml has to exist."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain, islice, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.config.read_yaml import BadYaml, read_yaml
from trainer.config.resolve import BY_ITS_VERSION, flat, resolve
from trainer.config.settings import Config, fields
from trainer.errors import ConfigError, DataError, OctetError
from trainer.machine import disk
from trainer.machine.safe_text import print
from trainer.run_folder.changed_settings import NO_EFFECT
from trainer.run_folder.journal import VERDICT, lines_of, read_records
from trainer.stats import Share, wilson
from trainer.watch.history import History
from trainer.watch.measure import LENIENT, REWARD, STRICT, Measure, chosen, number, percent
from trainer.watch.verdict import Verdict, verdict_of

# Settings that a run replaces after its warm-up, by those of what the warm-up has left.
OF_WARMUP = ("warmup.steps", "warmup.rounds", "lora.start", "model.name", "model.revision")
TAIL = 2**18  # bytes at the end of samples.jsonl that are searched for the last answers

Record = Mapping[str, Any]


@contextmanager
def as_written(*paths: Path, remedy: str = "Leave it out") -> Iterator[None]:
    """Raise DataError if values in these files or folders are missing, or of another type than Octet writes."""
    try:
        yield
    except OctetError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        for path in (path / "eval.json" for path in paths):
            if content := _object(path):
                with as_written(path, remedy="Repair or delete it"):  # names the file if its numbers cannot be shown
                    table_rows(content["evaluations"], content.get("comparisons", []))
        what = "a file in it, such as eval.json or metrics.jsonl," if any(path.is_dir() for path in paths) else "it"
        reason = f"{what} is not as Octet writes it ({type(error).__name__}: {error})"
        raise DataError(", ".join(map(str, paths)), reason, remedy) from error


def _stored(name: str) -> cached_property[dict[str, Any]]:
    """Return a property with the content of a JSON file in the run folder."""
    return cached_property(lambda run: _object(run.folder / name))


@dataclass(frozen=True)
class RunFiles:
    """A run folder. Files are read on first use, and missing ones are empty."""

    folder: Path
    settings: Mapping[str, Any]
    data = _stored("data.json")
    machine = _stored("machine.json")
    best = _stored("best/best.json")  # the step of the model in `best/`, and its accuracy or reward
    memory_plan = _stored("memory_plan.json")  # bytes that were planned for each phase of a run on a GPU

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def config(self) -> Config:
        """The settings. Raise DataError if this version of Octet has other ones."""
        path = self.folder / "config.yaml"
        return _config(path, path.stat().st_mtime_ns)

    @property
    def made_with(self) -> list[str]:
        """The comments at the head of config.yaml: versions and machine."""
        lines = (self.folder / "config.yaml").read_text(encoding="utf-8").splitlines()
        return [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("#"), lines)]

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        return read_records(self.folder / "metrics.jsonl")

    @property
    def code(self) -> list[str]:
        """The checksums of the user's code that the run depends on, wherever it lies."""
        named = [key for key in self.machine if key.startswith("checksum of ") and key.endswith(".py")]
        return sorted(str(self.machine[key]) for key in named)

    @cached_property
    def history(self) -> History:
        memory = self.machine.get("memory", 0.0)
        return History(self.config, self.metrics, self.data.get("training_problems", 0), memory)

    @cached_property
    def evaluation(self) -> dict[str, Any]:
        """The content of eval.json, once the run has ended: a resumed run still has that of its earlier end."""
        content = _object(self.folder / "eval.json") if self.has_ended else {}
        return {"comparisons": [], **content} if content.get("evaluations") else {}

    @cached_property
    def measure(self) -> Measure:
        """The measure that decides whether the run has learned: accuracy in the format that is paid, or reward."""
        answer, weights, paid = (self.settings[key] for key in ("task.answer", "reward.weights", "reward.answer"))
        return chosen(answer, weights or {}, paid, self.metrics)

    def held_out(self, record: Record) -> Share | None:
        """Return the held-out result in a line of metrics, in the format that is paid. It is None if the line is about
        other problems than the last result: a resumed run may ask others."""
        if self.measure.logged not in record or record.get("eval/problems") != self._asked:
            return None
        if self.measure == LENIENT:
            right, problems = record["eval/lenient"], record["eval/problems"]
            return Share(right, *wilson(right * problems, problems))
        return Share(record[self.measure.logged], record["eval/low"], record["eval/high"])

    @property
    def evaluated(self) -> list[tuple[Share, Record]]:
        """The held-out results with their lines of metrics. If a finished run was asked other problems later, its
        results are in eval.json alone, and their lines have only the step and the number of problems."""
        logged: list[tuple[Share, Record]] = [(share, line) for line in self.metrics if (share := self.held_out(line))]
        models, measure = self.evaluation.get("evaluations", [])[:2], self.measure
        ends = [Share(one[measure.of_model], *one[f"{measure.prefix}interval"]) for one in models]
        lines: list[Record] = [{"step": step, "eval/problems": self._asked} for step in (0, self.steps)]
        return logged or [*zip(ends, lines)]

    @cached_property
    def _asked(self) -> int | None:
        """The number of problems of the last held-out result."""
        models = self.evaluation.get("evaluations") or [{}]
        logged = (line.get("eval/problems") for line in self.metrics[::-1] if self.measure.logged in line)
        asked: int | None = models[0].get("problems", next(logged, None))
        return asked

    def worth(self, measure: Measure, model: str = "trained") -> dict[tuple[str, ...], float]:
        """Return whether a model solved each held-out problem, or its reward, by question and gold answer."""
        name, answers = measure.of_answer, self.trained if model == "trained" else self.greedy.get(model, {})
        return {key: answer[name] for key, answer in answers.items() if answer.get(name) is not None}

    @cached_property
    def before_training(self) -> "RunFiles":
        """The files with the answers of the untrained base: those of the warm-up, if there was one."""
        warmup, (steps, _, *starts) = self.folder / "warmup", [self.settings[key] for key in OF_WARMUP]
        follows = steps or any(Path(str(start)).parent.name == "warmup" for start in starts)  # or it is left over
        return read_run(warmup) if follows and (warmup / "config.yaml").is_file() else self

    @property
    def current(self) -> "RunFiles":
        """The files that grow: those of the warm-up until it has ended."""
        first = self.before_training
        return self if self.metrics or first.has_ended else first

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The settings that the run was started with: those of its warm-up, if there was one, with its own."""
        first = self.before_training.settings
        return {**self.settings, **{key: first[key] for key in OF_WARMUP}}

    @cached_property
    def greedy(self) -> dict[str, dict[tuple[str, ...], Record]]:
        """The greedy answers of each model to the held-out problems, by question and gold answer, because ids may
        differ between runs. If problems of an environment have the same question, the later keys include the id."""
        answers: dict[str, dict[tuple[str, ...], Record]] = {}
        for one in _lines(self.folder / "eval_answers.jsonl"):
            if one.get("temperature") == 0 and {"model", "question", "gold"} <= one.keys():
                key, of_model = (one["question"], one["gold"]), answers.setdefault(one["model"], {})
                of_model[(*key, one.get("problem", "")) if key in of_model else key] = one
        return answers

    @property
    def trained(self) -> dict[tuple[str, ...], Record]:
        """The greedy answers of the trained model, once the run has ended."""
        return self.greedy.get("trained", {}) if self.has_ended else {}

    @property
    def verdict(self) -> Verdict:
        return verdict_of(self.evaluation, self.metrics, self.config)

    @property
    def steps(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    def step_of(self, folder: Path) -> int | None:
        """Return the step after which the model in a folder of the run was saved, or None if it is not recorded."""
        own, place = self.folder.resolve(), folder.resolve()
        if place == own / "best":
            return self.best.get("step")
        if place == own / "merged" and ((made := exported(place)) or not self.config.merges):
            return made.get("step")  # `octet merge` wrote it, or an end of the run before run.merge=false
        if place.parent == own and place.name in ("adapter", "model", "merged"):
            return self.steps if self.has_ended else None  # a resumed run still has the result of its earlier end
        if saved := re.fullmatch(r"step_(\d+)", place.parent.name):  # place is the adapter of a checkpoint
            return int(saved[1])
        return exported(place).get("step")

    @property
    def total_steps(self) -> int:
        return self.config.total_steps(self.history.problems)

    @property
    def has_ended(self) -> bool:
        """True if there is a verdict, which a run writes last and a resumed run deletes."""
        return (self.folder / VERDICT).is_file()

    def flips(self) -> list[dict[str, Any]]:
        """Return the problems that only one of the first two models solved."""
        if not self.has_ended:
            return []
        first = (self.evaluation.get("comparisons") or [{"before": "base", "after": "trained"}])[0]
        names = f"{first['before']} -> {first['after']}"
        return [flip for flip in _lines(self.folder / "eval_flips.jsonl") if flip.get("models") == names]

    def samples(self) -> dict[str, Record]:
        """Return the first and the last good and bad answer of the run."""
        found: dict[str, Record] = {}
        for sample in _lines(self.folder / "samples.jsonl"):
            kind = "good" if self._is_good(sample) else "bad"
            found.setdefault(f"first {kind}", sample)
            found[f"last {kind}"] = sample
        return {name: found[name] for name in ("first good", "first bad", "last good", "last bad") if name in found}

    def last_samples(self) -> dict[str, Record]:
        """Return the last good and the last bad answer, without reading more than the end of the file."""
        last = {self._is_good(sample): sample for sample in _lines(self.folder / "samples.jsonl", TAIL)}
        return {f"last {'good' if good else 'bad'}": last[good] for good in (True, False) if good in last}

    def _is_good(self, sample: Record) -> bool:
        """Return True if an answer is right, or has earned more than the mean answer of the run if no reward is for
        right answers."""
        if self.measure.is_reward or "reward/correct" not in sample:
            return (sample.get("reward") or 0) > self.mean_reward
        return (sample["reward/correct"] or 0) > 0

    @cached_property
    def mean_reward(self) -> float:
        means = [record["reward/mean"] for record in self.metrics if "reward/mean" in record]
        return fmean(means) if means else 0.0


def exported(folder: Path) -> dict[str, Any]:
    """Return what `octet export` and `octet merge` record beside a model: where it is from, and its check."""
    return _object(folder / "export.json")


def _object(path: Path) -> dict[str, Any]:
    try:
        found = disk.parsed(path.read_bytes()) if path.is_file() else {}
    except ValueError as error:
        raise DataError(path, f"it is not JSON ({error})", "Repair or delete it") from None
    return found if isinstance(found, dict) else {}


def read_run(folder: Path) -> RunFiles:
    """Return the files of a run. Raise DataError if this is not the folder of a run."""
    path = folder / "config.yaml"
    return RunFiles(folder, _settings(path, path.stat().st_mtime_ns if path.is_file() else 0))


def read_runs(folders: Sequence[Path]) -> list[RunFiles]:
    """Read runs. If there is at least one, other folders that `runs/*` matches are left out with a message, and files,
    such as a log, without one. Raise DataError if a folder does not exist, because its name is wrong."""
    others = [folder for folder in folders if not (folder / "config.yaml").is_file()]
    runs = [read_run(folder) for folder in folders if folder not in others or not folder.exists()]
    if runs and (nameless := [path for path in others if not path.is_file()]):
        names = ", ".join(map(str, nameless))
        print(f"octet: left out, because there is no config.yaml in it: {names}", file=sys.stderr)
    return runs or [read_run(folder) for folder in others]


def names_of(runs: Sequence[RunFiles]) -> dict[Path, str]:
    """Return the names of runs by their folders: the name of a folder, or its whole path if several have that name."""
    names = [run.name for run in runs]
    return {run.folder: run.name if names.count(run.name) == 1 else str(run.folder) for run in runs}


def facts_of(run: RunFiles) -> dict[str, Any]:
    """Return the last and the best result, the number of steps and the seconds of training of a run and its warm-up."""
    lines = [*run.before_training.metrics, *run.metrics] if run.before_training is not run else run.metrics
    results = [(share, line) for share, line in run.evaluated if line["step"]]
    (value, *interval), last = results[-1] if results else ((None, None), {})
    facts = {"steps": run.steps, run.measure.name: value, "interval": interval if results else None}
    facts |= {"best": max((share.value for share, _ in results), default=None), "problems": last.get("eval/problems")}
    return facts | {"training_s": sum(map(seconds_of, lines))}


def phases(records: Sequence[Record], kind: str = "time") -> list[str]:
    """Return the phases of a step that have a time (or memory), without parts of a phase (`time/reward/answers`)."""
    logged = dict.fromkeys(chain.from_iterable(records))
    names = dict.fromkeys(name.removeprefix(f"{kind}/") for name in logged if name.startswith(kind))
    return [name for name in names if not re.search("/|_reserved$|_rank$", name) and name not in ("evaluation", "held")]


def seconds_of(record: Record) -> float:
    """Return the seconds of a step, those of an evaluation after it left out."""
    return sum(record[f"time/{name}"] for name in phases([record]))


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings that differ between runs and have an effect on what is learned."""
    return [key for key in fields() if key not in NO_EFFECT and len({str(one[key]) for one in settings}) > 1]


@lru_cache(1000)
def _config(path: Path, changed_ns: int) -> Config:
    """Return the settings of a run, cached, because parsing them takes ten times as long as drawing the run."""
    try:
        return resolve(str(path))
    except ConfigError as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix(f" {BY_ITS_VERSION}.")
        raise DataError(path, f"{reason} {BY_ITS_VERSION}") from None


@cache
def _usual() -> Mapping[str, Any]:
    return flat(Config().model_dump(mode="json"))


@lru_cache(1000)
def _settings(path: Path, changed_ns: int) -> dict[str, Any]:
    if not path.is_file():
        is_there = "there is no config.yaml in it, so it is not the folder of a run"
        reason = is_there if path.parent.is_dir() else "there is no such folder"
        raise DataError(path.parent, reason, "Name the folder of a run")
    try:
        settings = flat(read_yaml(path.read_bytes()), missing=...)
    except (BadYaml, AttributeError) as error:
        remedy = "Leave this run out"
        raise DataError(path, f"it contains no settings ({' '.join(str(error).split())})", remedy) from None
    for key in ("model.name", "task.name"):
        if settings[key] in (None, ...):
            raise DataError(path, f"it does not belong to a run: it has no {key}", "Leave this folder out")
    # a setting that the run's version did not have acted as its default does
    return {key: _usual()[key] if value is ... else value for key, value in settings.items()}


def _lines(path: Path, at_most: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines, or those in its last bytes. Incomplete lines are left out."""
    start = max(0, path.stat().st_size - at_most) if at_most and path.is_file() else 0
    for line in islice(lines_of(path, start), bool(start), None):
        with suppress(ValueError):
            if isinstance(record := disk.parsed(line), dict):
                yield record


def table_rows(evaluations: Sequence[Record], comparisons: Sequence[Record]) -> list[list[str]]:
    """Return a row for each number of eval.json, with a column for each model."""
    first = evaluations[0]["name"]
    measure = REWARD if "reward" in evaluations[0] else STRICT
    rows = {measure.row: [measure.text(one[measure.of_model], one["interval"]) for one in evaluations]}
    rows |= _of_parts(evaluations, measure)
    if measure.is_reward and "accuracy" in evaluations[0]:
        rows["correct"] = [percent(one["accuracy"], one["accuracy_interval"]) for one in evaluations]
        rows["in any format"] = [percent(one["lenient_accuracy"], one["lenient_interval"]) for one in evaluations]
    if measure == STRICT:
        rows |= {
            "in any format": [percent(one["lenient_accuracy"], one["lenient_interval"]) for one in evaluations],
            **_of_parts(evaluations, LENIENT),
            "wrong answer": [_category(one, "wrong answer") for one in evaluations],
            "no answer found": [_category(one, "no answer") for one in evaluations],
        }
    rows["cut off"] = [f"{one['truncated']:.1%}" for one in evaluations]
    rows["mean tokens"] = [f"{one['mean_tokens']:.1f}" for one in evaluations]
    pairs = [one for one in comparisons if one["before"] == first]
    if pairs and measure.is_reward:
        rows["difference"] = ["", *(number(one["difference"], "+") for one in pairs)]
    if pairs:
        rows[measure.flips] = ["", *(f"+{one['gained']}/-{one['lost']}" for one in pairs)]
    return [[name, *cells] for name, cells in (rows | _sampled(evaluations, measure)).items()]


def _of_parts(evaluations: Sequence[Record], measure: Measure) -> dict[str, list[str]]:
    key = f"{measure.prefix}parts"
    names = evaluations[0].get(key, ())
    return {f"  {name}": [measure.text(*one[key][name].values()) for one in evaluations] for name in names}


def _category(described: Mapping[str, Any], name: str) -> str:
    return f"{described['categories'][name]} ({described['category_shares'][name]:.1%})"


def _sampled(evaluations: Sequence[Record], measure: Measure) -> dict[str, list[str]]:
    """Return avg@k, maj@k and pass@k, and the spread over several trials, if answers were also sampled."""
    if not (sampled := [one["sampled"] for one in evaluations if "sampled" in one]):
        return {}
    every = [one.get("sampled", {}) for one in evaluations]  # in a run the merged model is not sampled
    rows = {
        name.replace("lenient", "any format"): [measure.text(*one[name].values()) if one else "" for one in every]
        for name in sampled[0]
        if "@" in name
    }
    if sampled[0]["trials"] > 1:
        spread = [f"{measure.text(one['mean'])} ± {measure.text(one['deviation'])}" for one in sampled]
        rows[f"mean of {sampled[0]['trials']} trials"] = spread
    return rows
