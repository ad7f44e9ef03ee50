"""`octet plan`: will it fit? The plan of `memory.py` as a table, and what could be larger, or has to be smaller."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer.checks import memory
from trainer.config import command_line, ds_config
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.shipped import TRAIN
from trainer.memory import search
from trainer.memory.planner import GB, ROOMY, Plan, Planner, offload_saves
from trainer.memory.search import MOST_IN_A_GROUP, Placement
from trainer.model.shapes import shape_of

WORDS = {"fits": "it fits", "tight": "it may fit, and may not", "too large": "it does not fit"}
WORDS["no ram"] = "it fits the card, and not the RAM of this machine"
NOT_ENOUGH = {
    "rows": "fewer rows",
    "group_size": "a smaller group",
    "max_new_tokens": "shorter answers",
    "tokens_per_micro_batch": "smaller micro-batches",
}
STYLES = {"fits": "bold green", "tight": "bold yellow", "too large": "bold red", "no ram": "bold red"}


@dataclass(frozen=True)
class Asked:
    """What is planned, and the command that would run it."""

    placement: Placement
    card: str  # and where its size comes from
    command: Sequence[str]
    free_ram: int  # of this machine
    proposal: Sequence[str] | None = None  # settings that the search has changed

    @property
    def ram_fits(self) -> bool:
        return self.placement.plan.ram_peak <= self.free_ram


def show(options: Namespace) -> None:
    asked = ask(options)
    if options.search:
        asked = searched(asked)
    if options.json:
        print(json.dumps(document(asked), indent=2))
        return
    console = Console(highlight=False, soft_wrap=True)
    console.print(title(asked))
    console.print(table(asked.placement.plan))
    for line in said(asked):
        console.print(line)


def ask(options: Namespace) -> Asked:
    machine = hardware.detect()
    vram, card = _card(options, machine)
    preset = options.preset or ("nano" if options.model == "nano" else command_line.preset_for(vram) or "8gb")
    named = {"model.name": options.model, "rollout.group_size": options.group, "prompt.max_tokens": options.prompt}
    named |= {"rollout.max_new_tokens": options.completion}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + options.overrides
    config = command_line.resolve(preset, options.recipe, overrides)
    ranks, local = hardware.ranks(machine) if options.gpus is None else (options.gpus, options.gpus)
    free = hardware.free_ram()
    ram = free if options.vram is None else inf  # a card that is named may be in another machine
    shape = shape_of(config.model.name, config.model.revision)
    placement = Placement(shape, config, ranks, round(vram * GB), ram, local).settled
    _refuse_what_a_run_refuses(placement)
    recipe = ["--recipe", options.recipe] if options.recipe else []
    return Asked(placement, card, [*TRAIN.split(), "--preset", preset, *recipe, *overrides], free)


def _card(options: Namespace, machine: hardware.Hardware) -> tuple[float, str]:
    if options.vram is not None:
        if not 0 < options.vram < inf:
            raise ConfigError(f"--vram {options.vram:g}: that is no size of a card. Write its GB, such as --vram 8.")
        return options.vram, f"{options.vram:g} GB"
    if machine.gpus:
        return machine.memory_gb, str(machine)
    size = command_line.GPU_PRESETS.get(options.preset, search.WITHOUT_A_CARD)
    return size, f"{size} GB, because no GPU was found; --vram says otherwise"


def _refuse_what_a_run_refuses(placement: Placement) -> None:
    config, ranks = placement.config, placement.world_size
    ds_config.check(config, has_gpu=True)
    if ranks < 1:
        raise ConfigError(f"--gpus {ranks}: at least one card is needed. Write --gpus 1.")
    config.refuse_idle(ranks)
    if reason := memory.adapts_nothing(config, placement.shape) or memory.too_little_for_vllm(placement):
        raise ConfigError(reason)
    new_tokens = config.rollout.max_new_tokens
    if new_tokens > placement.longest_answer:
        raise ConfigError(
            f"rollout.max_new_tokens={new_tokens}: the context of this model is {placement.shape.context}, and "
            f"prompts of up to {config.prompt.max_tokens} tokens have to be in it as well. Write --completion "
            f"{placement.longest_answer} or less, or a smaller --prompt."
        )


def searched(asked: Asked) -> Asked:
    placement = asked.placement
    found = placement.search()
    if found is None:
        raise ConfigError(
            f"--search: nothing makes {placement.config.model.name} fit {placement.vram / GB:g} GB{_and_ram(asked)}: "
            f"one answer at a time, with every lever, it is still too large. {placement.nearest()}"
        )
    found = placement.grown(found)
    changes = search.difference(placement.config, found)
    keys = {change.partition("=")[0] for change in changes}
    kept = [part for part in asked.command if part.partition("=")[0] not in keys]
    return replace(asked, placement=replace(placement, config=found), command=[*kept, *changes], proposal=changes)


def _and_ram(asked: Asked) -> str:
    return "" if asked.placement.ram == inf else f" and the {asked.free_ram / GB:.1f} GB of RAM that are free"


# for people


def title(asked: Asked) -> str:
    placement, config = asked.placement, asked.placement.config
    planner = placement.planner
    lora, rollout, ranks = config.lora, config.rollout, placement.world_size
    how = f"LoRA r={lora.r}" if lora.enabled else "the whole model"
    precision = config.model.quantize if config.model.quantize != "none" else config.model.dtype.replace("auto", "bf16")
    checkpoints = "with" if config.model.gradient_checkpointing else "without"
    by_vllm = " by vLLM in this process" if config.rollout.engine == "vllm_colocate" else ""
    return (
        f"[bold]{config.model.name}[/] on {asked.card}{f', one of {ranks}' if ranks > 1 else ''}\n"
        f"{_count(placement.shape.parameters)} parameters in {precision}, {_count(planner.trained)} trained ({how}), "
        f"engine {config.engine.ds_config}, {checkpoints} gradient checkpointing\n"
        f"a step: {rollout.problems} x {rollout.group_size} answers of up to {rollout.max_new_tokens:,} tokens to "
        f"prompts of up to {planner.prompt:,}\n"
        f"at a time: {planner.rows} sampled{by_vllm}, {config.optim.tokens_per_micro_batch:,} tokens trained on\n"
    )


def _count(number: float) -> str:
    return f"{number / GB:.2f} B" if number >= GB / 10 else f"{number / 10**6:.2f} M"


def table(plan: Plan) -> Table:
    """Phases in columns, what the bytes are for in rows."""
    phases = list(plan.phases)
    made = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, show_footer=True)
    made.add_column("GB", footer="[bold]peak[/]", no_wrap=True)
    for phase in phases:
        highest = "bold reverse" if phase == plan.peak_phase else "bold"
        peak = f"[{highest}]{plan.peak_of(phase) / GB:.2f}[/]"
        made.add_column(phase, footer=peak, justify="right", min_width=9, no_wrap=True)
    for name in _names(plan):
        made.add_row(name, *(_cell(plan.phases[phase].get(name, 0)) for phase in phases))
    return made


def _names(plan: Plan) -> list[str]:
    """Terms in the order in which they come up; what belongs to every phase last."""
    names = dict.fromkeys(name for terms in plan.phases.values() for name in terms)
    last = ("allocator slack", "CUDA context")
    shown = [name for name in names if any(terms.get(name, 0) for terms in plan.phases.values())]
    return [*(name for name in shown if name not in last), *last]


def _cell(size: int) -> str:
    if not size:
        return "[dim]-[/]"
    return f"{size / GB:.2f}" if size >= GB / 200 else "[dim]<0.01[/]"


def said(asked: Asked) -> Iterator[str]:
    plan, placement = asked.placement.plan, asked.placement
    share = plan.peak / plan.vram
    most = plan.phases[plan.peak_phase][plan.dominant]
    found = "no ram" if plan.fits and not asked.ram_fits else plan.verdict
    yield (
        f"\n[{STYLES[found]}]{WORDS[found]}[/]: {plan.peak / GB:.1f} of {plan.vram / GB:.1f} GB "
        f"({share:.0%}) in {plan.peak_phase}; most of it is {plan.dominant}, {most / GB:.2f} GB"
    )
    yield from _of_ram(asked)
    yield from _of_offload(asked)
    yield from _of_limits(asked)
    if asked.proposal is not None:
        yield f"proposed: [bold]{shlex.join(asked.proposal) or 'nothing to change'}[/]"
        yield f"  {shlex.join(asked.command)}"
    elif not placement.fits(placement.config):
        yield "--search proposes settings that do"
    yield f"[dim]An estimate for the longest prompts and answers; below {ROOMY:.0%} of a card counts as fitting.[/]"


def _of_ram(asked: Asked) -> Iterator[str]:
    plan = asked.placement.plan
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in plan.ram_terms.items())
    fits = "" if asked.ram_fits else ", [bold red]more than this machine has[/]"
    yield f"RAM: {plan.ram_peak / GB:.1f} GB ({parts}) of {asked.free_ram / GB:.1f} that are free here{fits}"


def _of_offload(asked: Asked) -> Iterator[str]:
    placement, config = asked.placement, asked.placement.config
    here = offload_saves(placement.shape, config, placement.world_size)
    whole = search.changed(config, {"lora.enabled": False, "model.quantize": "none"})
    of_whole = offload_saves(placement.shape, whole, placement.world_size)
    times = of_whole / Planner(placement.shape, whole, placement.world_size, placement.vram).weights
    if config.lora.enabled:
        yield (
            f"optimizer offload saves {here / GB:.2f} GB here: with LoRA it is no lever. If the whole model were "
            f"trained\n  it would save {of_whole / GB:.1f} GB, {times:.1f} x the weights"
        )
    else:
        yield f"optimizer offload saves {here / GB:.1f} GB of the card here, {times:.1f} x the weights"


def _of_limits(asked: Asked) -> Iterator[str]:
    placement, plan = asked.placement, asked.placement.plan
    found = limits(placement)
    whole = " (all of a step)" if found["rows"] == placement.all_rows else ""
    many = " or more" if found["group_size"] == MOST_IN_A_GROUP else ""
    tokens = found["tokens_per_micro_batch"]
    micro_batch = "a whole step" if tokens == placement.most_tokens else f"{tokens:,} tokens"
    words = {
        "rows": f"{found['rows']} rows{whole}",
        "group_size": f"{found['group_size']:,}{many} answers in a group",
        "max_new_tokens": f"{found['max_new_tokens']:,} new tokens",
        "tokens_per_micro_batch": f"micro-batches of {micro_batch}",
    }
    if most := [text for name, text in words.items() if found[name]]:
        yield f"the most that fits, each with the rest as it is:\n  {', '.join(most)}"
    if none := [NOT_ENOUGH[name] for name in words if not found[name]]:
        other = f"{plan.peak_phase} takes {plan.peak / GB:.1f} GB" if not plan.fits else "RAM is short"
        yield f"not enough by themselves, because {other}:\n  {', '.join(none)}"


def limits(placement: Placement) -> dict[str, int]:
    return {
        "rows": placement.largest_rows(),
        "group_size": placement.largest_group(),
        "max_new_tokens": placement.longest_completion(),
        "tokens_per_micro_batch": placement.largest_micro_batch(),
    }


# for programs


def document(asked: Asked) -> dict[str, Any]:
    placement, plan = asked.placement, asked.placement.plan
    return {
        "model": placement.config.model.name,
        "parameters": placement.shape.parameters,
        "gpus": placement.world_size,
        "vram_bytes": plan.vram,
        "phases": plan.phases,
        "peaks": {phase: plan.peak_of(phase) for phase in plan.phases},
        "allocated": {phase: plan.allocated_of(phase) for phase in plan.phases},
        "ram": plan.ram,
        "ram_bytes": plan.ram_peak,
        "ram_free_bytes": asked.free_ram,
        "ram_fits": asked.ram_fits,
        "peak_bytes": plan.peak,
        "peak_phase": plan.peak_phase,
        "dominant": plan.dominant,
        "verdict": plan.verdict,
        "largest": limits(placement),
        "optimizer_offload_saves": round(offload_saves(placement.shape, placement.config, placement.world_size)),
        "proposal": asked.proposal,
        "command": shlex.join(asked.command),
    }
