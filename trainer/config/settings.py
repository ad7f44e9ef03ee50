"""The configuration: what can be set, and its default.

Each setting has one place, a section in `sections/`; numbers that follow from other settings are properties.
`command_line.py` makes a configuration out of presets, recipes and the command line. Memory and precision of the engine
are in `ds_configs/`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import model_validator

from trainer.config.sections.algorithm import Algorithm, Correction, GradReg, Kl
from trainer.config.sections.base import RUNS, Section
from trainer.config.sections.model import Lora, Model
from trainer.config.sections.reward import REWARDS, Code, Judge, Reward, function_name
from trainer.config.sections.rollout import SERVED_RANKS, Rollout, Turns, Vllm
from trainer.config.sections.run import Engine, Eval, Optim, Run
from trainer.config.sections.task import PROMPT_STYLES, PromptSettings, TaskSettings
from trainer.config.sections.teacher import Teacher
from trainer.config.sections.warmup import Warmup
from trainer.errors import ConfigError

__all__ = ["PROMPT_STYLES", "REWARDS", "RUNS", "SERVED_RANKS", "Algorithm", "Code", "Config", "Correction", "Engine"]
__all__ += [
    "Eval",
    "GradReg",
    "Judge",
    "Kl",
    "Lora",
    "Model",
    "Optim",
    "PromptSettings",
    "Reward",
    "Rollout",
    "Run",
    "Section",
]
__all__ += ["TaskSettings", "Teacher", "Turns", "Vllm", "Warmup", "fields", "function_name", "is_section", "sections"]


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
            raise ConfigError(
                f"rollout.problems={problems}",
                f"each of the {ranks} ranks needs one",
                f"Write rollout.problems={ranks} or more, or take {problems} GPUs or fewer",
            )

    @property
    def is_warmup(self) -> bool:
        """Return True if this is the supervised run itself."""
        return self.warmup.only

    def warmed_up_in(self, folder: Path | None) -> Config:
        """Return the settings of the warm-up as a run of its own, which are the same for those settings themselves.

        With an advantage of 1 and no correction for a sampler, the loss is the cross-entropy of the solutions.
        """
        warmup = self.warmup
        return self._with(
            warmup={"only": True},
            teacher=Teacher().model_dump(),
            rollout={"temperature": 1.0, "ahead": 0},
            algorithm={
                **Algorithm().model_dump(),
                "loss": "reinforce_baseline",
                "correction": {"level": "none"},
                "lr": warmup.lr,
            },
            run={"dir": folder, "steps": warmup.steps, "epochs": None, "merge": self.run.merge and warmup.only},
            eval={
                "every": warmup.every,
                "metric": warmup.metric if warmup.every else "accuracy",
                "patience": warmup.patience,
            },
        )

    def after_warmup(self, folder: Path) -> Config:
        """Return the settings of the run that goes on with the warm-up in a folder, which left a link `start`."""
        done = {"steps": 0, "rounds": 1}
        if self.lora.enabled and self.warmup.then == "same":
            return self._with(warmup=done, lora={"start": folder / "start"})
        weights = folder / ("merged" if self.lora.enabled else "start")
        base = {key: getattr(self.model, key) for key in ("name", "revision", "quantize")}
        teacher = base if self.shares_base else {}  # whose adapter is one of the model before the warm-up
        model = {"name": str(weights), "revision": None}
        return self._with(warmup=done, model=model, lora={"start": None}, teacher=teacher)

    def _with(self, **sections: dict[str, Any]) -> Config:
        """Return validated settings with other values in some sections."""
        values = self.model_dump()
        return Config.model_validate(values | {name: values[name] | part for name, part in sections.items()})

    @property
    def shares_base(self) -> bool:
        """Return True if the teacher is an adapter over the base that the policy has."""
        own, base = self.teacher, self.model
        named = (own.name, own.revision, own.quantize)
        is_same = own.name is None or named == (base.name, base.revision, base.quantize)
        stays = self.lora.enabled and self.lora.init == "zero"
        return own.adapter is not None and own.url is None and is_same and stays

    @property
    def teacher_model(self) -> Model | None:
        """Return the model that is loaded as the teacher, beside that of the policy; None if there is none."""
        own = self.teacher
        if own.name is None or own.url or self.shares_base:
            return None
        return Model(name=own.name, revision=own.revision, quantize=own.quantize, dtype=self.model.dtype)

    @model_validator(mode="after")
    def _teacher_is_heard(self) -> Config:
        teacher, kl = self.teacher, self.algorithm.kl
        if teacher.name is None and teacher.url is None:
            for key, usual in (("revision", "null"), ("quantize", "none")):
                if getattr(teacher, key) not in (None, usual):
                    raise ValueError(
                        f"teacher.{key}={getattr(teacher, key)}: it is for a model that is loaded as the teacher, and "
                        f"there is none. Write teacher.name as well, or teacher.{key}={usual}"
                    )
        if not teacher.is_there:
            return self
        if teacher.name is None and teacher.url is None and not self.shares_base:
            wrong = "lora.enabled=false" if not self.lora.enabled else f"lora.init={self.lora.init}"
            raise ValueError(
                f"teacher.adapter={teacher.adapter}: it is over the base of this run, and {wrong} changes the base. "
                f"Write teacher.name={self.model.name} as well, which loads the base again"
            )
        if teacher.url and self.rollout.temperature != 1:
            raise ValueError(
                f"rollout.temperature={self.rollout.temperature:g}: the server at teacher.url gives log-probs at a "
                "temperature of 1 only. Write rollout.temperature=1, or teacher.name=MODEL without teacher.url"
            )
        if teacher.form == "loss" and (kl.coef == 0 or kl.where != "loss" or kl.refresh or kl.estimator != "k2"):
            raise ValueError(
                "teacher.form=loss: the teacher is the reference of the reverse KL in the loss, whose gradient k2 has. "
                "Write algorithm.kl.coef=1 algorithm.kl.estimator=k2, and leave algorithm.kl.where and "
                "algorithm.kl.refresh out"
            )
        if teacher.form == "advantage" and self.algorithm.loss in ("reinforce", "gspo"):
            raise ValueError(
                f"teacher.form=advantage: algorithm.loss={self.algorithm.loss} knows no advantage of a single token. "
                "Write algorithm.loss=reinforce_baseline"
            )
        if self.rollout.dead_groups == "refill":
            raise ValueError(
                "rollout.dead_groups=refill: a teacher has something to say about every answer, so no group is dead. "
                "Write rollout.dead_groups=keep"
            )
        return self

    @model_validator(mode="after")
    def _warmup_has_steps(self) -> Config:
        warmup = self.warmup
        if warmup.only and not warmup.steps:
            raise ValueError("warmup.steps=0: a warm-up alone needs some steps. Write warmup.steps=200")
        if warmup.rounds > max(1, warmup.steps):
            raise ValueError(
                f"warmup.rounds={warmup.rounds}: each round has a step, and warmup.steps={warmup.steps}. Write "
                f"warmup.steps={20 * warmup.rounds}"
            )
        if warmup.rounds > 1 and warmup.source == "solutions":
            raise ValueError(
                f"warmup.rounds={warmup.rounds}: worked solutions stay the same from round to round. Write "
                "warmup.from=samples, or warmup.rounds=1"
            )
        if warmup.patience is not None and (warmup.every is None or not self.eval.problems):
            raise ValueError(
                f"warmup.patience={warmup.patience} counts evaluations during the warm-up, and there are none. Write "
                "warmup.every=20, and eval.problems above 0"
            )
        if self.eval.metric == "loss" and not warmup.only:
            raise ValueError(
                "eval.metric=loss: only a warm-up has held-out solutions to measure it on. Write eval.metric=accuracy"
            )
        goes_on = warmup.steps and not warmup.only and warmup.then == "same" and self.lora.enabled
        if goes_on and self.lora.init != "zero":
            raise ValueError(
                f"warmup.then=same: with lora.init={self.lora.init} the adapter of the warm-up is exported with "
                "twice its rank. Write warmup.then=merged"
            )
        if self.lora.start is not None and (not self.lora.enabled or self.lora.init != "zero"):
            wrong = "lora.enabled=false" if not self.lora.enabled else f"lora.init={self.lora.init}"
            raise ValueError(
                f"lora.start={self.lora.start}: an adapter is trained further, and {wrong} makes another one. Leave "
                "one of the two out"
            )
        return self

    @model_validator(mode="after")
    def _quantised_base_stays_as_it_is(self) -> Config:
        kind = self.model.quantize
        if kind != "none" and not self.lora.enabled:
            raise ValueError(
                f"model.quantize={kind}: quantised weights cannot be trained, only an adapter over them. Write "
                "lora.enabled=true, or model.quantize=none"
            )
        if kind != "none" and self.lora.init != "zero":
            raise ValueError(
                f"lora.init={self.lora.init}: PiSSA changes the weights of the base, and model.quantize={kind} "
                "does not allow that. Write lora.init=zero, or model.quantize=none"
            )
        named = self.lora.targets if isinstance(self.lora.targets, tuple) else ()
        targets = {name.rpartition(".")[2] for name in named}
        for key, usual, layer in (("embeddings", "device", "embed_tokens"), ("quantize_head", "none", "lm_head")):
            value = getattr(self.model, key)
            if value != usual and (not self.lora.enabled or layer in targets):
                raise ValueError(
                    f"model.{key}={value}: it is for a layer that is not trained, and {layer} is. Write "
                    f"model.{key}={usual}, or train an adapter of other layers"
                )
        if kind == "int8" and self.lora.dora:
            raise ValueError(
                "lora.dora=true: PEFT cannot measure the rows of model.quantize=int8 reliably. Write "
                "model.quantize=nf4, or lora.dora=false"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.algorithm.loss == "reinforce" and self.rollout.dead_groups == "refill":
            raise ValueError(
                "rollout.dead_groups=refill: algorithm.loss=reinforce learns from the raw reward, so a group of equal "
                "rewards is not dead. Write rollout.dead_groups=keep"
            )
        if self.rollout.dead_by == "correct" and self.task.answer == "none" and "code" not in self.reward.weights:
            raise ValueError(
                "rollout.dead_by=correct: with task.answer=none no answer is right, so every group is dead. Write "
                "rollout.dead_by=reward"
            )
        if self.rollout.dead_by == "correct" and not self.drops_dead_groups:
            keeps = "algorithm.loss=reinforce" if self.algorithm.loss == "reinforce" else "rollout.dead_groups=keep"
            raise ValueError(
                f"rollout.dead_by=correct: {keeps} trains on dead groups too, so it has no effect. Write "
                "rollout.dead_by=reward"
            )
        if self.algorithm.minibatches > self.rollout.problems:
            raise ValueError(
                f"algorithm.minibatches={self.algorithm.minibatches}: groups stay whole, and a step has "
                f"rollout.problems={self.rollout.problems}. Write algorithm.minibatches={self.rollout.problems} or less"
            )
        return self

    @model_validator(mode="after")
    def _vllm_can(self) -> Config:
        rollout = self.rollout
        if rollout.engine == "vllm_server" and not (rollout.vllm.urls or rollout.vllm.start):
            raise ValueError(
                "rollout.engine=vllm_server: no server is named. Write rollout.vllm.urls=http://127.0.0.1:8000, or "
                "rollout.vllm.start=true"
            )
        if rollout.engine not in ("auto", "vllm_server") and (rollout.vllm.urls or rollout.vllm.start):
            raise ValueError(
                f"rollout.engine={rollout.engine}: this engine uses no server, and rollout.vllm names one. "
                "Write rollout.engine=vllm_server"
            )
        if rollout.ahead and not rollout.uses_servers:
            raise ValueError(
                "rollout.ahead=1: only a server samples while the policy trains. Write rollout.engine=vllm_server"
            )
        if rollout.ahead and self.algorithm.correction.level == "none":
            raise ValueError(
                "rollout.ahead=1: the answers come from the previous policy, and algorithm.correction.level=none "
                "does not correct for that. Write algorithm.correction.level=token"
            )
        if rollout.uses_servers or rollout.engine == "vllm_colocate":
            self._vllm_serves_the_adapter()
        return self

    def _vllm_serves_the_adapter(self) -> None:
        if not self.lora.enabled:
            if self.rollout.vllm.urls:
                raise ValueError(
                    "rollout.vllm.urls: the weights of a whole model (lora.enabled=false) go only to servers that the "
                    "run started. Write rollout.vllm.start=true"
                )
        elif self.lora.dora:
            raise ValueError(
                f"rollout.engine={self.rollout.engine}: vLLM serves no DoRA. Write lora.dora=false, or "
                "rollout.engine=decode"
            )
        elif unserved := self.lora.unserved_targets:
            raise ValueError(
                f"lora.targets={','.join(self.lora.targets)}: vLLM serves no adapter of {', '.join(unserved)}, "
                "except for a few models. Write lora.targets=all, which leaves them out, or rollout.engine=decode"
            )
        elif self.lora.served_rank > SERVED_RANKS[-1]:
            most = SERVED_RANKS[-1]
            raise ValueError(
                f"lora.r={self.lora.r}: vLLM serves ranks up to {most}, and this adapter is exported with rank "
                f"{self.lora.served_rank}. Write lora.r={most * self.lora.r // self.lora.served_rank} or less"
            )

    @property
    def drops_dead_groups(self) -> bool:
        """Return False for `reinforce` too: it learns from the raw reward, even if all answers have the same. So does a
        teacher, who has something to say about every answer."""
        learns = self.algorithm.loss == "reinforce" or self.teacher.is_there
        return self.rollout.dead_groups != "keep" and not learns

    @property
    def can_drop_by_correct(self) -> bool:
        """Return True if `rollout.dead_by=correct` has an effect: dead groups are left out, and being right is paid."""
        paid = self.reward.weights
        return self.drops_dead_groups and ("code" in paid or (self.task.answer != "none" and bool(paid.get("correct"))))

    @property
    def constant_divisor(self) -> float:
        """Return the most tokens that the answers of one update can have: the constant by which `dr_grpo` divides."""
        rollout = self.rollout
        return rollout.problems * rollout.group_size * rollout.max_new_tokens / self.algorithm.minibatches

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, width=100)


def sections() -> dict[str, Any]:
    return {name: info.annotation for name, info in Config.model_fields.items()}


def fields(section: Any = None, prefix: str = "") -> list[str]:
    """Return every setting as `section.key`; a setting of a nested section is `reward.judge.url`."""
    found = []
    for key, info in (section or Config).model_fields.items():
        name = info.alias or key
        inner = is_section(info.annotation)
        found += fields(info.annotation, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return found


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)
