"""A study: arms, each a set of settings, trained with the same seeds; and the controls that judge their gains.

preset: nano
settings: {run.steps: 20, eval.problems: 512}     of every run
seeds: 5                                          or a list: [0, 1, 2]
arms:                                             the first is what the others are compared with
  grpo: {}
  small: {lora.r: 4}
controls: [format, random, shuffled_gold, shuffled_advantages, supervised]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator

from trainer.config.command_line import resolve
from trainer.config.read_yaml import BadYaml, read_yaml, written
from trainer.config.sections.base import RUNS, Section
from trainer.config.settings import Config, fields
from trainer.errors import ConfigError, did_you_mean
from trainer.machine.visible import visible

LONGEST = 80  # characters of a wrong value in a message
KINDS = {
    "preset": "the name of a preset, such as nano",
    "recipe": "the name of a recipe, such as dapo",
    "settings": "names of settings with their values, such as {run.steps: 20}",
    "seeds": "their number, such as 3, or a list of them",
    "arms": "a name and settings for each, such as {grpo: {}, small: {lora.r: 4}}; a name of digits stands in quotes",
    "controls": "a list of names, such as [format, random]",
    "renumbered": "true or false",
}
BASE, SUPERVISED = "base", "supervised"
# What is trained in place of the first arm. `base` is none of them: every run evaluates it.
CONTROLS: Mapping[str, Mapping[str, Any]] = {
    "format": {"reward.weights": {"format": 1.0}, "reward.custom": [], "reward.judge.url": None},
    "random": {"reward.control": "random"},
    "shuffled_gold": {"reward.control": "shuffled_gold"},
    "shuffled_advantages": {"reward.control": "shuffled_advantages"},
    SUPERVISED: {
        "warmup.only": True,
        "warmup.steps": 1,  # later as many as have the tokens of the first arm
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
    """Preset of every run."""
    recipe: str | None = None
    """Recipe of every run."""
    settings: dict[str, Any] = Field({})
    """Settings of every run."""
    seeds: int | tuple[int, ...] = 3
    """How many seeds, from 0, or which. Below three, no arm is judged."""
    arms: dict[str, dict[str, Any] | None] = Field(min_length=1)
    """The arms: a name, and settings. The others are compared with the first, and the controls belong to it."""
    controls: tuple[str, ...] = ()
    """Controls of the first arm."""
    renumbered: bool = False
    """Ask each model the held-out problems with new numbers as well, for GSM8K only; see `docs/evaluation.md`."""

    @field_validator("seeds")
    @classmethod
    def _some(cls, value: int | tuple[int, ...]) -> int | tuple[int, ...]:
        listed = value if isinstance(value, tuple) else range(value)
        if not listed or min(listed) < 0 or len({*listed}) < len(listed):
            raise ValueError(f"{value} will not do: they are a number above 0, or a list of different ones. Write 3")
        return value

    @field_validator("controls")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len({*value}) < len(value):
            raise ValueError(f"{', '.join(value)}: one is named twice. Remove it")
        for name in value:
            if name not in CONTROLS:
                nearest = did_you_mean(name, [*CONTROLS])
                raise ValueError(f"there is no control {name}.{nearest} Known: {', '.join(CONTROLS)}")
        return value

    @field_validator("arms")
    @classmethod
    def _names_of_folders(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name == BASE or name in CONTROLS or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(
                    f"{name!r} cannot name an arm: a name has letters, digits, - and _, and is not that of a control"
                )
        return value


@dataclass(frozen=True)
class Study:
    """A study as its file describes it. Its runs are in the folder `runs/FILE`, each in one of its own."""

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
        """The settings of each arm, and of each control, beside those of every run."""
        own = {name: settings_of(settings or {}) for name, settings in self.file.arms.items()}
        return own | {name: {**own[self.first], **CONTROLS[name]} for name in self.file.controls}

    def runs(self) -> Iterator[StudyRun]:
        """Yield the runs seed by seed, so that a study that is broken off can be read."""
        for seed in self.seeds:
            for arm, settings in self.arms.items():
                values = settings_of(self.file.settings) | settings
                own = (f"{key}={written(value)}" for key, value in values.items())
                folder = written(str(self.folder / f"{arm}-{seed}"))
                of_run = (f"run.seed={seed}", f"run.dir={folder}", "run.merge=false")
                yield StudyRun(arm, seed, (*own, *self.overrides, *of_run))

    def config(self, run: StudyRun) -> Config:
        """Return the settings of a run. Raise ConfigError if they are wrong."""
        try:
            return resolve(self.file.preset, self.file.recipe, run.overrides)
        except ConfigError as error:
            raise ConfigError(f"{self.path}, arm {run.arm}: {error}") from None


def read_study(path: Path, overrides: Sequence[str] = ()) -> Study:
    """Read the file of a study, and check the settings of every run, with those of the command line last. Raise
    ConfigError if there is a mistake in them."""
    if not path.is_file():
        raise ConfigError(path, "there is no such file. docs/studies.md has an example")
    try:
        found = read_yaml(path.read_bytes())
        if not isinstance(found, dict):
            raise BadYaml("it is no mapping of names to values")
        study = Study(path, StudyFile.model_validate(found), tuple(overrides))
        runs = [*study.runs()]
    except BadYaml as error:
        raise ConfigError(path, f"{error}. docs/studies.md has an example") from None
    except ValidationError as error:
        raise ConfigError("\n".join(dict.fromkeys(_explained(path, one) for one in error.errors()))) from None
    for run in runs:
        _must_be_free(study, run)
        config, where = study.config(run), f"{path}, arm {run.arm}"
        if not config.eval.problems:
            raise ConfigError(where, "eval.problems=0: a study compares held-out answers", "Write 512")
        is_merged = config.warmup.steps and config.warmup.then == "merged"
        if study.file.renumbered and (config.task.name != "gsm8k" or not config.lora.enabled or is_merged):
            raise ConfigError(
                where,
                "renumbered: only GSM8K can be asked with new numbers, of an adapter and its base",
                "Write task.name=gsm8k, lora.enabled=true and warmup.then=same, or renumbered: false",
            )
        if study.file.controls and run.arm == study.first and config.reward.control != "none":
            raise ConfigError(
                where,
                f"reward.control={config.reward.control}: the controls belong to the first arm, which is a control "
                "itself",
                "Put another arm first, or remove controls",
            )
    return study


def settings_of(values: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Return settings by their whole names: `{lora: {r: 4}}` and `{lora.r: 4}` are the same."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{section}{key}"
        is_section = isinstance(value, dict) and name not in fields()
        inside = settings_of(value, f"{name}.") if is_section else {name: value}
        if twice := found.keys() & inside:
            raise BadYaml(f"{min(twice)} is written twice. Remove one")
        found |= inside
    return found


def _must_be_free(study: Study, run: StudyRun) -> None:
    """Raise ConfigError if the file sets what the study itself sets."""
    taken = {"run.seed": "seeds says them", "run.dir": f"the runs are in {study.folder}", "run.merge": "it is false"}
    for key, why in taken.items():
        if sum(text.startswith(f"{key}=") for text in run.overrides) > 1:
            raise ConfigError(f"{study.path}, arm {run.arm}: {key} is not for the file of a study: {why}. Remove it.")


def _explained(path: Path, error: Any) -> str:
    key = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        nearest = did_you_mean(key, [*StudyFile.model_fields])
        return f"{path}: {key}: there is no such key.{nearest} Known: {', '.join(StudyFile.model_fields)}."
    if error["type"] == "value_error":
        return f"{path}: {key}: {error['msg'].removeprefix('Value error, ')}."
    found = "it is missing" if error["type"] == "missing" else f"{visible(str(error['input']))[:LONGEST]!r} will not do"
    return f"{path}: {key}: {found}. Write {KINDS[key]}."
