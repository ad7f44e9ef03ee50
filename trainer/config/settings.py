"""The configuration: all settings with their defaults.

Each setting is in one section of `sections/`; numbers that follow from other settings are properties. `resolve.py`
combines presets, recipes and the command line. Memory and precision of the engine are in `ds_configs/`.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from trainer.config import conflicts
from trainer.config.paths import stored
from trainer.config.sections.algorithm import Algorithm, Correction, GradReg, Kl
from trainer.config.sections.base import RUNS, Section, is_section
from trainer.config.sections.model import Lora, Model
from trainer.config.sections.optimizer import Engine, Optim
from trainer.config.sections.reward import RIGHT, Code, Judge, Reward, function_name
from trainer.config.sections.rollout import SERVED_RANKS, Rollout, Turns, Vllm
from trainer.config.sections.run import Eval, Run
from trainer.config.sections.task import PromptSettings, TaskSettings
from trainer.config.sections.teaching import Teacher, Warmup
from trainer.errors import ConfigError

__all__ = ["RUNS", "SERVED_RANKS", "Algorithm", "Code", "Config", "Correction", "Engine", "Eval", "GradReg", "Judge"]
__all__ += ["Kl", "Lora", "Model", "Optim", "PromptSettings", "Reward", "Rollout", "Section", "TaskSettings", "Teacher"]
__all__ += ["Turns", "Vllm", "Warmup", "fields", "function_name", "is_section"]


class Config(Section):
    model: Model = Model()
    lora: Lora = Lora()
    task: TaskSettings = TaskSettings()
    prompt: PromptSettings = PromptSettings()
    reward: Reward = Reward()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    optim: Optim = Optim()
    engine: Engine = Engine()
    run: Run = Run(steps=100)
    eval: Eval = Eval()
    warmup: Warmup = Warmup()
    teacher: Teacher = Teacher()

    @property
    def merges(self) -> bool:
        return self.run.merge and self.lora.enabled

    def total_steps(self, train_problems: int) -> int:
        if self.run.steps is not None:
            return self.run.steps
        assert self.run.epochs is not None, "validated: one of the two is set"
        return max(1, round(self.run.epochs * train_problems / self.rollout.problems))

    def refuse_idle(self, ranks: int) -> None:
        """Raise ConfigError if there are more ranks than problems: a group is never split over ranks."""
        problems = self.rollout.problems
        if problems < ranks:
            remedy = f"Write rollout.problems={ranks} or more, or take {problems} GPUs or fewer"
            raise ConfigError(f"rollout.problems={problems}", f"each of the {ranks} ranks needs one", remedy)

    @property
    def is_warmup(self) -> bool:
        """Return True if this run is a warm-up itself."""
        return self.warmup.only

    def warmed_up_in(self, folder: Path | None) -> "Config":
        """Return the settings of the warm-up as a separate run; applied to those settings, this changes nothing. With
        an advantage of 1 and no correction for a sampler, the loss is the cross-entropy of the solutions."""
        warmup, objective = self.warmup, {"loss": "reinforce_baseline", "correction": {"level": "none"}}
        metric = warmup.metric if warmup.every else "accuracy"
        # vLLM allows one engine in a process, and that is for the run after the warm-up
        engine = "auto" if self.rollout.engine == "vllm_colocate" else self.rollout.engine
        return self._with(
            warmup={"only": True},
            teacher=Teacher().model_dump(),
            rollout={"engine": engine, "temperature": 1.0, "ahead": 0, "weights": "same"},  # which need a correction
            algorithm={**Algorithm().model_dump(), **objective, "lr": warmup.lr},
            run={"dir": folder, "steps": warmup.steps, "epochs": None, "merge": self.run.merge and warmup.only},
            eval={"every": warmup.every, "metric": metric, "patience": warmup.patience},
        )

    def after_warmup(self, folder: Path) -> "Config":
        """Return the settings of the run that follows the warm-up in a folder, which contains a link `start`."""
        done = {"steps": 0, "rounds": 1}
        if self.lora.enabled and self.warmup.then == "same":
            return self._with(warmup=done, lora={"start": folder / "start"})
        weights = folder / ("merged" if self.lora.enabled else "start")
        base = {key: getattr(self.model, key) for key in ("name", "revision", "quantize")}
        teacher = base if self.shares_base else {}  # its adapter belongs to the model before the warm-up
        model = {"name": str(weights), "revision": None}
        return self._with(warmup=done, model=model, lora={"start": None}, teacher=teacher)

    def changed(self, settings: Mapping[str, Any]) -> "Config":
        """Return the settings with some values replaced, such as {"rollout.rows": 8}, without validation."""
        config = self
        for key, value in settings.items():
            section, _, name = key.partition(".")
            config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
        return config

    def _with(self, **sections: dict[str, Any]) -> "Config":
        """Return validated settings with other values in some sections."""
        values = self.model_dump()
        return Config.model_validate(values | {name: values[name] | part for name, part in sections.items()})

    @property
    def shares_base(self) -> bool:
        """Return True if the teacher is an adapter over the base of the policy."""
        teacher, base = self.teacher, self.model
        keys = ("name", "revision", "quantize")
        is_same = teacher.name is None or all(getattr(teacher, key) == getattr(base, key) for key in keys)
        is_kept = self.lora.enabled and self.lora.init == "zero"
        return teacher.adapter is not None and teacher.url is None and is_same and is_kept

    @property
    def teacher_model(self) -> Model | None:
        """Return the model that is loaded as the teacher, in addition to the policy's; None if there is none."""
        teacher = self.teacher
        if teacher.name is None or teacher.url or self.shares_base:
            return None
        return Model(name=teacher.name, revision=teacher.revision, quantize=teacher.quantize, dtype=self.model.dtype)

    @model_validator(mode="after")
    def _fits_together(self) -> "Config":
        conflicts.check(self)
        return self

    @property
    def learns_from_dead_groups(self) -> bool:
        """Return True with `reinforce` or a teacher, which learn from groups of equal rewards too."""
        return self.algorithm.loss == "reinforce" or self.teacher.is_there

    @property
    def drops_dead_groups(self) -> bool:
        """Return True if dead groups are left out."""
        return self.rollout.dead_groups != "keep" and not self.learns_from_dead_groups

    @property
    def pay_of_right(self) -> float:
        """Return the reward of a right answer; 0 if it earns none, or if nothing decides which answers are right."""
        weights = self.reward.weights
        return weights.get("code", 0.0) + (weights.get("correct", 0.0) if self.task.answer != "none" else 0.0)

    @property
    def shaping(self) -> dict[str, float]:
        """Return the weights of all rewards except those for right answers, if these are rewarded."""
        weights = self.reward.all_weights if self.pay_of_right > 0 else {}
        return {name: weight for name, weight in weights.items() if weight and name not in RIGHT}

    @property
    def paid(self) -> str:
        """Return what an answer is paid for, such as `reward: 1.0 correct + 0.1 format`."""
        weights = {name: weight for name, weight in self.reward.all_weights.items() if weight}
        if self.task.answer == "none":
            weights.pop("correct", None)
        paid = " + ".join(f"{weight} {name}" for name, weight in weights.items()).replace("+ -", "- ")
        if self.reward.control != "none":
            return f"reward: reward.control={self.reward.control} in place of {paid}"
        if self.pay_of_right or self.task.answer == "none":
            return f"reward: {paid or 'nothing'}"
        both = ", ".join(f"{name}: {weight:g}" for name, weight in {"correct": 1.0, **weights}.items())
        return f"reward: {paid}, without `correct` (reward.weights='{{{both}}}' would pay it, too)"

    @property
    def gates_shaping(self) -> bool:
        """Return True if shaping is excluded from the division by a deviation."""
        return self.reward.gate and bool(self.shaping) and self.algorithm.advantage in ("grpo", "batch_std")

    @property
    def can_drop_by_correct(self) -> bool:
        """Return True if `rollout.dead_by=correct` has an effect: dead groups are dropped, and right answers are
        rewarded or found by tests."""
        return self.drops_dead_groups and ("code" in self.reward.weights or self.pay_of_right > 0)

    @property
    def constant_divisor(self) -> float:
        """Return the largest possible number of tokens in an update, the constant by which `dr_grpo` divides."""
        rollout = self.rollout
        return rollout.problems * rollout.group_size * rollout.max_new_tokens / self.algorithm.minibatches

    def to_yaml(self, folder: Path | None = None) -> str:
        """Return the settings as YAML. For a run folder, their paths can be read from anywhere."""
        settings = self.model_dump(mode="json")
        return yaml.safe_dump(stored(settings, folder) if folder else settings, sort_keys=False, width=100)


@cache
def fields(section: Any = None, prefix: str = "") -> tuple[str, ...]:
    """Return every setting as `section.key`; a setting of a nested section is `reward.judge.url`."""
    names: list[str] = []
    for key, info in (section or Config).model_fields.items():
        name = f"{prefix}{info.alias or key}"
        annotation: Any = info.annotation
        names += fields(annotation, f"{name}.") if is_section(annotation) else [name]
    return tuple(names)
