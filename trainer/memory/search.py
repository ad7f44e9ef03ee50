"""What to change so that a run fits a card, and what is refused before anything is downloaded because it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from importlib.util import find_spec
from math import ceil, inf
from typing import Any

from trainer.config import ds_config
from trainer.config.settings import SERVED_RANKS, Config
from trainer.errors import ConfigError
from trainer.memory.planner import GB, Plan, Planner, longest_prompt, plan
from trainer.model import hub
from trainer.model.shapes import SHIPPED, Shape, UnknownFamily, from_config, known_shape

# What the search may change, in the order in which it is given back where it was in vain; offload needs checkpoints.
LEVERS = (
    "lora.enabled",
    "model.quantize",
    "model.activation_offload",
    "model.gradient_checkpointing",
    "engine.ds_config",
    "rollout.rows",
    "optim.tokens_per_micro_batch",
)
WITHOUT_A_CARD = 8  # GB that are planned for on a machine that has none
MOST_IN_A_GROUP = 1024  # that are looked for


@dataclass(frozen=True)
class Placement:
    """A model, and what it has to fit into."""

    shape: Shape
    config: Config
    world_size: int
    vram: int
    ram: float = inf  # of the machine, for all its ranks; without end where another machine is meant
    local_size: int | None = None  # ranks on the machine; all of them where nobody says

    @cached_property
    def plan(self) -> Plan:
        return self.plan_of(self.config)

    @property
    def planner(self) -> Planner:
        return Planner(self.shape, self.config, self.world_size, self.vram, self.local_size)

    def plan_of(self, config: Config) -> Plan:
        return plan(self.shape, config, self.world_size, self.vram, self.local_size)

    def fits(self, config: Config) -> bool:
        """Card and machine."""
        planned = self.plan_of(config)
        return planned.fits and planned.ram_peak <= self.ram

    @property
    def settled(self) -> Placement:
        """With the engine that rollout.engine=auto will be, as far as it can be known without the model."""
        rollout = self.config.rollout
        if rollout.engine != "auto" or rollout.asks_servers or not find_spec("vllm") or self.why_no_vllm:
            return self
        return self.with_vllm

    @property
    def with_vllm(self) -> Placement:
        return replace(self, config=changed(self.config, {"rollout.engine": "vllm_colocate"}))

    @cached_property
    def why_no_vllm(self) -> str | None:
        """Why `auto` leaves a vLLM that is installed alone; None where it takes it into the process."""
        lora, planned = self.config.lora, self.with_vllm.plan
        if not lora.enabled or lora.dora or lora.served_rank > SERVED_RANKS[-1]:
            return "it serves plain LoRA adapters only"
        if unserved := lora.unserved_targets:
            return f"it serves no adapter of {', '.join(unserved)}"
        if self.config.model.quantize != "none":
            return "the base is quantised, and would be held a second time as it came"
        if not planned.fits:
            return f"with it {planned.peak / GB:.1f} GB are planned ({planned.peak_phase}), of {self.vram / GB:.1f} GB"
        if planned.ram_peak > self.ram:
            return f"while it sleeps {planned.ram_peak / GB:.1f} GB of RAM are planned, of {self.ram / GB:.1f} GB free"
        return None

    @property
    def all_rows(self) -> int:
        """Answers of one rank in a step."""
        rollout = self.config.rollout
        return ceil(rollout.problems / self.world_size) * rollout.group_size

    @property
    def longest_row(self) -> int:
        return longest_prompt(self.shape, self.config) + self.config.rollout.max_new_tokens

    # what fits

    def largest_micro_batch(self) -> int:
        return self._largest(self.most_tokens, "optim.tokens_per_micro_batch")

    @property
    def most_tokens(self) -> int:
        """More than a step has."""
        return self.longest_row * self.all_rows * 2

    def largest_rows(self) -> int:
        return self._largest(self.all_rows, "rollout.rows")

    def largest_group(self) -> int:
        """Whose answers are sampled side by side."""
        return self._largest(MOST_IN_A_GROUP, "rollout.group_size", "rollout.rows")

    def longest_completion(self) -> int:
        return self._largest(self.longest_answer, "rollout.max_new_tokens")

    @property
    def longest_answer(self) -> int:
        """That leaves room in the context: for the longest prompt, or half of it where prompts are cut anyway."""
        context = self.shape.context
        return context - min(self.config.prompt.max_tokens, context // 2)

    def _largest(self, limit: int, *keys: str) -> int:
        """The largest value of these settings that fits, the others as they are; 0 if none does."""
        low, high = 0, max(limit, 0)
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(changed(self.config, dict.fromkeys(keys, middle))):
                low = middle
            else:
                high = middle - 1
        return low

    # what to change

    def search(self) -> Config | None:
        """The first rung of the ladder that fits, without what was changed in vain; None where none does."""
        found = next(filter(self._runs, self._ladder()), None)
        if found is None:
            return None
        for key in LEVERS:
            spared = changed(found, {key: value_of(self.config, key)})
            if self._runs(spared):
                found = spared
        return found

    def _runs(self, config: Config) -> bool:
        return _is_possible(config) and self.fits(config)

    @property
    def as_adapter(self) -> Placement:
        """The same with LoRA, under an engine that leaves the weights whole."""
        engine = ds_config.read(self.config.engine.ds_config).get("zero_optimization", {})
        settings: dict[str, Any] = {"lora.enabled": True}
        if ds_config.splits_weights(engine):
            settings["engine.ds_config"] = "zero2_offload"
        return replace(self, config=changed(self.config, settings))

    def nearest(self) -> str:
        """What to write instead: settings of this model, an adapter of it, or a smaller model."""
        for placement in (self, self.as_adapter):
            if found := placement.search():
                return f"What fits: {' '.join(difference(self.config, found))}"
        smaller = {name: shape for name, shape in SHIPPED.items() if re.fullmatch(r"Qwen/Qwen2\.5-[\d.]+B", name)}
        for name, shape in sorted(smaller.items(), key=lambda item: -item[1].parameters):
            placement = replace(self, shape=shape)
            if shape.parameters < self.shape.parameters and (found := placement.search()):
                return f"What fits: {' '.join([f'model.name={name}-Instruct', *difference(self.config, found)])}"
        return "Write --preset nano, or a smaller model.name."

    def _ladder(self) -> Iterator[Config]:
        """What costs least comes first, and precision is given up last. A rung keeps what was changed below it."""
        yield self.config
        lora, given = self.config.lora, self.config.model.quantize
        can_be_quantised = lora.enabled and lora.init == "zero"
        for quantize in dict.fromkeys([given, *(["nf4"] if can_be_quantised else [])]):
            rung = changed(self.config, {"model.quantize": quantize})
            yield rung
            for key, values in self._levers():
                for value in values:
                    rung = changed(rung, {key: value})
                    yield rung

    def _levers(self) -> list[tuple[str, list[Any]]]:
        rollout, whole = self.config.rollout, not self.config.lora.enabled
        few = min(rollout.rows, rollout.group_size)
        return [
            ("model.gradient_checkpointing", [True]),
            ("model.activation_offload", [False]),
            ("engine.ds_config", ["zero2", "zero2_offload"] if whole else []),
            ("rollout.rows", _halves(rollout.rows, few)),
            ("optim.tokens_per_micro_batch", _halves(self.config.optim.tokens_per_micro_batch, self.longest_row)),
            ("model.activation_offload", [True]),
            ("engine.ds_config", ["zero3_offload"] if whole else []),
            ("rollout.rows", _halves(few, 1)),
        ]

    def grown(self, config: Config) -> Config:
        """Larger micro-batches and more rows while they fit: the card is paid for."""
        for key, limit in (("rollout.rows", self.all_rows), ("optim.tokens_per_micro_batch", 16384)):
            value = value_of(config, key)
            while value * 2 <= limit and self.fits(larger := changed(config, {key: value * 2})):
                config, value = larger, value * 2
        return config


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value > least:
        value = max(least, value // 2)
        found.append(value)
    return found


def value_of(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _is_possible(config: Config) -> bool:
    if config.model.activation_offload and not config.model.gradient_checkpointing:
        return False
    try:
        ds_config.check(config, has_gpu=True)
    except ConfigError:
        return False
    return True


def changed(config: Config, settings: dict[str, Any]) -> Config:
    for key, value in settings.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def difference(before: Config, after: Config) -> list[str]:
    """As it is written on the command line."""
    differing = [key for key in LEVERS if value_of(before, key) != value_of(after, key)]
    return [f"{key}={str(value_of(after, key)).lower()}" for key in differing]


def planned_shape(config: Config) -> Shape | None:
    """None for a family that is not planned for, and where the hub does not say."""
    name, revision = config.model.name, config.model.revision
    try:
        return known_shape(name, revision) or from_config(name, hub.configuration(config.model))
    except (UnknownFamily, hub.Refused, hub.Unreachable):  # whoever loads it says more
        return None
