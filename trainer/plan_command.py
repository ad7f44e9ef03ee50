"""`octet plan`: will it fit? The plan of `memory.py` as a table, and what could be larger, or has to be smaller."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from trainer import hardware, levers, settings
from trainer.errors import ConfigError
from trainer.levers import Placement
from trainer.memory import GB, ROOMY, Plan, Planner, offload_saves
from trainer.shapes import shape_of

WORDS = {"fits": "it fits", "tight": "it may fit, and may not", "too large": "it does not fit"}
STYLES = {"fits": "bold green", "tight": "bold yellow", "too large": "bold red"}


@dataclass(frozen=True)
class Asked:
    """What is planned, and the command that would run it."""

    placement: Placement
    card: str  # and where its size comes from
    command: Sequence[str]
    proposal: Sequence[str] = ()  # settings that the search has changed


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
    preset = options.preset or ("nano" if options.model == "nano" else settings.preset_for(vram) or "8gb")
    named = {"model.name": options.model, "rollout.group_size": options.group, "prompt.max_tokens": options.prompt}
    named |= {"rollout.max_new_tokens": options.completion}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None] + options.overrides
    config = settings.resolve(preset, None, overrides)
    ranks = max(1, len(machine.gpus)) if options.gpus is None else options.gpus
    if ranks < 1:
        raise ConfigError(f"--gpus {ranks}: at least one card is needed. Write --gpus 1.")
    placement = Placement(shape_of(config.model.name, config.model.revision), config, ranks, round(vram * GB))
    _refuse_too_long(placement)
    return Asked(placement, card, ["./run_deepspeed.sh", "--preset", preset, *overrides])


def _card(options: Namespace, machine: hardware.Hardware) -> tuple[float, str]:
    if options.vram is not None:
        if options.vram <= 0:
            raise ConfigError(f"--vram {options.vram:g}: a card has more than that. Write its GB, such as --vram 8.")
        return options.vram, f"{options.vram:g} GB"
    if machine.gpus:
        return machine.memory_gb, str(machine)
    size = settings.GPU_PRESETS.get(options.preset, levers.WITHOUT_A_CARD)
    return size, f"{size} GB, because no GPU was found; --vram says otherwise"


def _refuse_too_long(placement: Placement) -> None:
    context, new_tokens = placement.shape.context, placement.config.rollout.max_new_tokens
    if new_tokens >= context:
        raise ConfigError(
            f"rollout.max_new_tokens={new_tokens}: the context of this model is {context}, and a prompt has to be in "
            f"it as well. Write --completion {context // 2} or less."
        )


def searched(asked: Asked) -> Asked:
    placement = asked.placement
    found = placement.search()
    if found is None:
        raise ConfigError(
            f"--search: nothing makes {placement.config.model.name} fit {placement.vram / GB:g} GB: one answer at a "
            "time, with every lever, it is still too large. Write a smaller --model, --completion or --prompt."
        )
    found = placement.grown(found)
    changes = levers.difference(placement.config, found)
    keys = {change.partition("=")[0] for change in changes}
    kept = [part for part in asked.command if part.partition("=")[0] not in keys]
    return Asked(replace(placement, config=found), asked.card, [*kept, *changes], changes or ["nothing to change"])


# for people


def title(asked: Asked) -> str:
    placement, config = asked.placement, asked.placement.config
    planner = Planner(placement.shape, config, placement.world_size, placement.vram)
    lora, rollout, ranks = config.lora, config.rollout, placement.world_size
    how = f"LoRA r={lora.r}" if lora.enabled else "the whole model"
    precision = config.model.quantize if config.model.quantize != "none" else config.model.dtype.replace("auto", "bf16")
    checkpoints = "with" if config.model.gradient_checkpointing else "without"
    return (
        f"[bold]{config.model.name}[/] on {asked.card}{f', one of {ranks}' if ranks > 1 else ''}\n"
        f"{_count(placement.shape.parameters)} parameters in {precision}, {_count(planner.trained)} trained ({how}), "
        f"engine {config.engine.ds_config}, {checkpoints} gradient checkpointing\n"
        f"a step: {rollout.problems} x {rollout.group_size} answers of up to {rollout.max_new_tokens:,} tokens to "
        f"prompts of up to {planner.prompt:,}\n"
        f"at a time: {planner.rows} sampled, {config.optim.tokens_per_micro_batch:,} tokens trained on\n"
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
    yield (
        f"\n[{STYLES[plan.verdict]}]{WORDS[plan.verdict]}[/]: {plan.peak / GB:.1f} of {plan.vram / GB:.1f} GB "
        f"({share:.0%}) in {plan.peak_phase}; most of it is {plan.dominant}, {most / GB:.2f} GB"
    )
    parts = max(plan.ram.values(), key=lambda terms: sum(terms.values()))
    yield f"RAM: {plan.ram_peak / GB:.1f} GB ({', '.join(f'{name} {size / GB:.1f}' for name, size in parts.items())})"
    yield from _of_offload(asked)
    yield from _of_limits(placement)
    if asked.proposal:
        yield f"proposed: [bold]{' '.join(asked.proposal)}[/]"
        yield f"  {' '.join(asked.command)}"
    elif not plan.fits:
        yield "--search proposes settings that do"
    yield f"[dim]An estimate for the longest prompts and answers; below {ROOMY:.0%} of a card counts as fitting.[/]"


def _of_offload(asked: Asked) -> Iterator[str]:
    placement, config = asked.placement, asked.placement.config
    here = offload_saves(placement.shape, config, placement.world_size)
    whole = levers.changed(config, {"lora.enabled": False, "model.quantize": "none"})
    of_whole = offload_saves(placement.shape, whole, placement.world_size)
    times = of_whole / Planner(placement.shape, whole, placement.world_size, placement.vram).weights
    if config.lora.enabled:
        yield (
            f"optimizer offload saves {here / GB:.2f} GB here: with LoRA it is no lever. If the whole model were "
            f"trained\n  it would save {of_whole / GB:.1f} GB, {times:.1f} x the weights"
        )
    else:
        yield f"optimizer offload saves {here / GB:.1f} GB of the card here, {times:.1f} x the weights"


def _of_limits(placement: Placement) -> Iterator[str]:
    found = limits(placement)
    if not any(found.values()):
        return
    whole = " (all of a step)" if found["rows"] == placement.all_rows else ""
    yield (
        f"the most that fits, each with the rest as it is: {found['rows']} rows{whole}, {found['group_size']} answers "
        f"in a\n  group, {found['max_new_tokens']:,} new tokens, micro-batches of "
        f"{found['tokens_per_micro_batch']:,} tokens"
    )


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
        "peak_bytes": plan.peak,
        "peak_phase": plan.peak_phase,
        "dominant": plan.dominant,
        "verdict": plan.verdict,
        "largest": limits(placement),
        "optimizer_offload_saves": round(offload_saves(placement.shape, placement.config, placement.world_size)),
        "proposal": list(asked.proposal),
        "command": " ".join(asked.command),
    }
