"""A study: arms, each a set of settings, trained with the same seeds; and the controls that judge their gains.

preset: nano
settings: {run.steps: 20, eval.problems: 512}     of every run
seeds: 5                                          or a list: [0, 1, 2]
arms:                                             the others are compared with the first one
  grpo: {}
  small: {lora.r: 4}
controls: [format, random, shuffled_gold, shuffled_advantages, supervised]
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError, model_validator

from trainer.config.nearest_name import did_you_mean
from trainer.config.read_yaml import BadYaml, read_yaml, written
from trainer.config.resolve import full_names, resolve
from trainer.config.sections.base import RUNS, Section
from trainer.config.sections.reward import Reward, function_name
from trainer.config.settings import Config
from trainer.errors import ConfigError

BASE, FORMAT, SUPERVISED = "base", "format", "supervised"
# Settings that replace those of the first arm. `base` is not a control, because every run evaluates it.
CONTROLS: Mapping[str, Mapping[str, Any]] = {
    FORMAT: {"reward.weights": {"format": 1.0}, "reward.custom": [], "reward.judge.url": None},
    "random": {"reward.control": "random"},
    "shuffled_gold": {"reward.control": "shuffled_gold"},
    "shuffled_advantages": {"reward.control": "shuffled_advantages"},
    SUPERVISED: {
        "warmup.only": True,
        "warmup.steps": 1,  # replaced later by as many steps as have the tokens of the first arm
        "warmup.from": "solutions",
        "warmup.rounds": 1,
        "warmup.patience": None,
    },
}


@dataclass(frozen=True, slots=True)
class StudyRun:
    """One run of a study. `overrides` are its settings as on a command line."""

    arm: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


class StudyFile(Section):
    preset: str = "nano"
    """Write the name of a preset, for every run."""
    recipe: str | None = None
    """Write the name of a recipe, for every run."""
    settings: dict[str, Any] = Field({})
    """Write the settings of every run, such as {run.steps: 20}."""
    seeds: PositiveInt | Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = 3
    """Write how many seeds, such as 3, or a list of them. Below three, no arm is judged."""
    arms: dict[str, dict[str, Any] | None] = Field(min_length=1)
    """Write a name and settings for each, such as {grpo: {}, small: {lora.r: 4}}; a name of digits needs quotes."""
    controls: tuple[str, ...] = ()
    """Write a list of controls of the first arm, such as [format, random]."""
    renumbered: bool = False
    """Write true to ask each model the held-out problems with new numbers as well: for GSM8K only."""

    @model_validator(mode="after")
    def _names_are_known_and_differ(self) -> "StudyFile":
        for key in ("seeds", "controls"):
            values = getattr(self, key)
            if isinstance(values, tuple) and len({*values}) < len(values):
                raise ValueError(f"{key}: {', '.join(map(str, values))}: one is named twice. Remove it")
        for name in self.controls:
            if name not in CONTROLS:
                nearest = did_you_mean(name, [*CONTROLS])
                raise ValueError(f"controls: there is no control {name}.{nearest} Known: {', '.join(CONTROLS)}")
        if taken := {BASE, *CONTROLS} & {*self.arms}:
            what = "the untrained base" if BASE in taken else "a control"
            name = BASE if BASE in taken else min(taken)
            raise ValueError(f"arms: {name!r} cannot name an arm, because it is {what}. Write another name")
        if odd := [name for name in self.arms if not re.fullmatch("[A-Za-z0-9_-]+", name)]:
            reason = f"arms: {odd[0]!r} cannot name an arm, because folders have its name"
            raise ValueError(f"{reason}. Write letters (a to z), digits, - and _")
        return self


@dataclass(frozen=True)
class Study:
    """A study and its file. Its runs are in subfolders of `runs/FILE`."""

    path: Path
    file: StudyFile
    overrides: tuple[str, ...] = ()  # of the command line, for every run

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def first(self) -> str:
        return next(iter(self.file.arms))

    @property
    def seeds(self) -> Sequence[int]:
        return self.file.seeds if isinstance(self.file.seeds, tuple) else range(self.file.seeds)

    @cached_property
    def arms(self) -> dict[str, dict[str, Any]]:
        """The settings of each arm and each control, without those of every run."""
        arms = {name: full_names(settings or {}) for name, settings in self.file.arms.items()}
        controls = {name: {**arms[self.first], **CONTROLS[name]} for name in self.file.controls}
        if FORMAT in controls:
            # without those of a judge and of functions that this control does not call; others become 0
            paid = self.config(StudyRun(self.first, 0, self._overrides(arms[self.first]))).reward
            own = {"judge", *map(function_name, paid.custom)}
            named = paid.weights if paid.weights != Reward().weights else {}
            weights = {name: 0.0 for name in named if name not in own} | {"format": 1.0}
            alone = {key: value for key, value in controls[FORMAT].items() if not key.startswith("reward.weights.")}
            controls[FORMAT] = alone | {"reward.weights": weights}
        return arms | controls

    def _overrides(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        every = full_names(self.file.settings)
        values = {**{key: value for key, value in every.items() if key not in settings}, **settings}  # theirs come last
        return (*(f"{key}={written(value)}" for key, value in values.items()), *self.overrides)

    def runs(self) -> Iterator[StudyRun]:
        """Yield the runs seed by seed, so that an interrupted study can be evaluated."""
        for seed in self.seeds:
            for arm, settings in self.arms.items():
                folder = written(str(self.folder / f"{arm}-{seed}"))
                of_run = (f"run.seed={seed}", f"run.dir={folder}", "run.merge=false")
                yield StudyRun(arm, seed, (*self._overrides(settings), *of_run))

    @cached_property
    def configs(self) -> dict[str, Config]:
        """The settings of each arm and each control, with one of the seeds."""
        return {run.arm: self.config(run) for run in self.runs()}

    def config(self, run: StudyRun) -> Config:
        """Return the settings of a run. Raise ConfigError if they are wrong."""
        try:
            return resolve(self.file.preset, self.file.recipe, run.overrides)
        except ConfigError as error:
            raise ConfigError(f"{self.path}, arm {run.arm}", str(error)) from None


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read a study and check the settings of every run. Raise ConfigError if there is a mistake in them."""
    if not path.is_file():
        raise ConfigError(path, "there is no such file", "docs/studies.md has an example")
    try:
        content = read_yaml(path.read_bytes())
        if not isinstance(content, dict):
            raise BadYaml("it is not a mapping of names to values")
        study = Study(path, StudyFile.model_validate(content), tuple(overrides))
        runs = [*study.runs()]
    except BadYaml as error:
        raise ConfigError(path, str(error), "docs/studies.md has an example") from None
    except ValidationError as error:
        raise _explained(path, error.errors()[0]) from None
    for run in runs:
        config = study.config(run)
        for reason, remedy in _refused(study, run, config):
            raise ConfigError(f"{path}, arm {run.arm}", reason, remedy)
    return study


def _refused(study: Study, run: StudyRun, config: Config) -> Iterator[tuple[str, str]]:
    """Yield the reason and the remedy for each setting that a study cannot use."""
    for key in ("run.seed", "run.dir", "run.merge"):
        if sum(text.startswith(f"{key}=") for text in run.overrides) > 1:
            yield f"{key}: the study sets it itself", "Remove it"
    if not config.eval.problems:
        yield "eval.problems=0: a study compares held-out answers", "Write 512"
    if config.task.answer == "none" and config.reward.control == "shuffled_gold":
        yield "task.answer=none: there are no gold answers to shuffle", "Remove shuffled_gold"
    is_merged = config.warmup.steps and config.warmup.then == "merged"
    if study.file.renumbered and (config.task.name != "gsm8k" or not config.lora.enabled or is_merged):
        remedy = "Write task.name=gsm8k, lora.enabled=true and warmup.then=same, or renumbered: false"
        yield "renumbered: only GSM8K can be asked with new numbers, of an adapter and its base", remedy
    if run.arm == FORMAT and {name for name, weight in config.reward.all_weights.items() if weight} != {"format"}:
        yield f"a setting of this command pays for more than {FORMAT}", "Write it under `settings:` in the file"
    if study.file.controls and run.arm == study.first and config.reward.control != "none":
        reason = f"reward.control={config.reward.control}: controls belong to the first arm, which is a control itself"
        yield reason, "Put another arm first, or remove controls"


def _explained(path: Path, error: Any) -> ConfigError:
    key, known = str(next(iter(error["loc"]), "")), StudyFile.model_fields
    if key in known:
        return ConfigError(path, f"{key}: {error['msg']}", known[key].description or "")
    if error["type"] == "extra_forbidden":
        nearest = did_you_mean(key, [*known])
        return ConfigError(path, f"{key}: there is no such key.{nearest}", f"Known: {', '.join(known)}")
    return ConfigError(path, error["msg"].removeprefix("Value error, "))
