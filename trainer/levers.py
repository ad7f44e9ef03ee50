"""What to change so that a run fits a card, and what is refused before anything is downloaded because it cannot."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any

from trainer import hardware, preflight
from trainer.config import Config
from trainer.errors import ConfigError, ModelError
from trainer.memory import GB, PROCESS, TIGHT, Plan, longest_prompt, plan
from trainer.shapes import SHIPPED, Shape, known_shape

LARGEST_ON_A_CPU = GB // 2  # parameters; with more a step takes many minutes
# What the search may change, in the order in which it is given back where it was in vain; offload needs checkpoints.
LEVERS = (
    "model.quantize",
    "model.activation_offload",
    "model.gradient_checkpointing",
    "engine.ds_config",
    "rollout.rows",
    "optim.tokens_per_micro_batch",
)
WITHOUT_A_CARD = 8  # GB that are planned for on a machine that has none


@dataclass(frozen=True)
class Placement:
    """A model, and what it has to fit into."""

    shape: Shape
    config: Config
    world_size: int
    vram: int

    @cached_property
    def plan(self) -> Plan:
        return self.plan_of(self.config)

    def plan_of(self, config: Config) -> Plan:
        return plan(self.shape, config, self.world_size, self.vram)

    def fits(self, config: Config) -> bool:
        return self.plan_of(config).fits

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
        return self._largest(self.longest_row * self.all_rows * 2, "optim.tokens_per_micro_batch")

    def largest_rows(self) -> int:
        return self._largest(self.all_rows, "rollout.rows")

    def largest_group(self) -> int:
        """Whose answers are sampled side by side."""
        return self._largest(1024, "rollout.group_size", "rollout.rows")

    def longest_completion(self) -> int:
        return self._largest(self.shape.context - 1, "rollout.max_new_tokens")

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
        found = next(filter(self.fits, self._ladder()), None)
        if found is None:
            return None
        for key in LEVERS:
            spared = changed(found, {key: _value(self.config, key)})
            possible = spared.model.gradient_checkpointing or not spared.model.activation_offload
            if possible and self.fits(spared):
                found = spared
        return found

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
            ("engine.ds_config", ["zero2_offload"] if whole else []),
            ("rollout.rows", _halves(rollout.rows, few)),
            ("optim.tokens_per_micro_batch", _halves(self.config.optim.tokens_per_micro_batch, self.longest_row)),
            ("model.activation_offload", [True]),
            ("engine.ds_config", ["zero3_offload"] if whole else []),
            ("rollout.rows", _halves(few, 1)),
        ]

    def grown(self, config: Config) -> Config:
        """Larger micro-batches and more rows while they fit: the card is paid for."""
        for key, limit in (("rollout.rows", self.all_rows), ("optim.tokens_per_micro_batch", 16384)):
            value = _value(config, key)
            while value * 2 <= limit and self.fits(larger := changed(config, {key: value * 2})):
                config, value = larger, value * 2
        return config


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value > least:
        value = max(least, value // 2)
        found.append(value)
    return found


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def changed(config: Config, settings: dict[str, Any]) -> Config:
    for key, value in settings.items():
        section, _, name = key.partition(".")
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={name: value})})
    return config


def difference(before: Config, after: Config) -> list[str]:
    """As it is written on the command line."""
    differing = [key for key in LEVERS if _value(before, key) != _value(after, key)]
    return [f"{key}={str(_value(after, key)).lower()}" for key in differing]


def check(config: Config, machine: hardware.Hardware) -> None:
    """Refuse what cannot run here before it is downloaded, once on each machine; warn where memory will be short. A
    model that only the hub knows is left to be tried."""
    shape = None if os.environ.get(preflight.CHECKED) else _planned_shape(config)
    if shape is None:
        return
    if reason := refusal(config, machine, shape):
        raise ConfigError(reason)
    if os.environ.get("LOCAL_RANK", "0") == "0" and (short := warning(config, machine, shape)):
        print(f"octet: warning: {short}", file=sys.stderr, flush=True)


def warning(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    """Where memory will be short, but a run can go on with less at a time."""
    if not machine.gpus or _placement(config, machine, shape).plan.fits:
        return None
    placement = _placement(config, machine, shape)
    found = placement.search()
    remedy = f" What fits: {' '.join(difference(config, found))}" if found else ""
    return (
        f"memory will be short: {placement.plan.peak / GB:.1f} GB are planned, and the card has "
        f"{machine.memory_gb:.1f} GB. Where it runs out, less is done at a time.{remedy}"
    )


def _planned_shape(config: Config) -> Shape | None:
    try:
        return known_shape(config.model.name)
    except ModelError:  # a family that is not planned for, or a broken folder: whoever loads it says so
        return None


def refusal(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    """Why this cannot run here, and what can; None where it can."""
    if not machine.gpus:
        return _too_large_for_a_cpu(config, machine, shape)
    return _too_large_for_the_card(config, machine, shape) or _too_large_for_ram(config, machine, shape)


def _placement(config: Config, machine: hardware.Hardware, shape: Shape) -> Placement:
    return Placement(shape, config, len(machine.gpus), int(machine.memory_gb * GB))


def _too_large_for_the_card(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    """At one answer at a time and without copies, which is what a run that is out of memory comes to by itself."""
    placement = _placement(config, machine, shape)
    plan = placement.plan_of(changed(config, {"rollout.rows": 1, "optim.tokens_per_micro_batch": 1}))
    least = plan.peak - plan.phases[plan.peak_phase].get("merged copies", 0)
    if least <= TIGHT * placement.vram:
        return None
    largest = f"{plan.dominant} {plan.phases[plan.peak_phase][plan.dominant] / GB:.1f} GB"
    return (
        f"model.name={config.model.name}: even one answer at a time takes {least / GB:.1f} GB ({largest}), and "
        f"the card has {machine.memory_gb:.1f} GB. {_remedy(placement)}"
    )


def _remedy(placement: Placement) -> str:
    found = placement.search()
    if found:
        return f"What fits: {' '.join(difference(placement.config, found))}"
    for name, shape in sorted(SHIPPED.items(), key=lambda item: -item[1].parameters):
        smaller = Placement(shape, placement.config, placement.world_size, placement.vram).search()
        if shape.family == "qwen2" and smaller and "Math" not in name:
            return f"What fits: {' '.join([f'model.name={name}-Instruct', *difference(placement.config, smaller)])}"
    return "Write --preset nano, or a smaller model.name."


def _too_large_for_ram(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    placement, available = _placement(config, machine, shape), hardware.free_ram()
    if placement.plan.ram_peak <= available:
        return None
    phase = max(placement.plan.ram.values(), key=lambda terms: sum(terms.values()))
    parts = ", ".join(f"{name} {size / GB:.1f} GB" for name, size in phase.items())
    remedies = ["lora.enabled=true"] if "optimizer state" in phase and not config.lora.enabled else []
    if placement.fits(changed(config, {"engine.ds_config": "zero2"})) and "optimizer state" in phase:
        remedies.append("engine.ds_config=zero2, which keeps the optimizer state on the card")
    remedy = "".join(f"{one}, " for one in remedies)
    return (
        f"engine.ds_config={config.engine.ds_config}: {placement.plan.ram_peak / GB:.1f} GB of CPU memory are needed "
        f"({parts}), and {available / GB:.1f} GB are free. Write {remedy}or a smaller model.name."
    )


def _too_large_for_a_cpu(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    name, size = config.model.name, shape.parameters
    needed = size * (2 if config.model.dtype == "bf16" else 4) + PROCESS
    available = hardware.free_ram()
    if needed > available:
        return (
            f"model.name={name}: no GPU was found, and on the CPU the weights take {needed / GB:.1f} GB of memory, of "
            f"which {available / GB:.1f} GB are free. Write a smaller model.name, or --preset nano."
        )
    if size > LARGEST_ON_A_CPU and config.model.dtype == "auto":
        return (
            f"model.name={name}: no GPU was found, and with {size / GB:.1f} B parameters on {machine.cores} CPU cores "
            "a step takes many minutes. Write --preset nano, a model.name of at most 0.5 B, or model.dtype=fp32 if "
            "that is what you want."
        )
    return None
