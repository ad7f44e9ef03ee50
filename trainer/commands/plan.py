"""`octet plan`: print the memory and hours of a run, and which settings could be larger or must be smaller. With a card
and no model, print the models that fit the card."""

import json
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import inf
from textwrap import wrap
from typing import Any

from rich.table import Table
from rich.text import Text

from trainer.commands.shared_options import add_settings_of_a_run, positive, words_of
from trainer.config import ds_config
from trainer.config.choose_preset import GPU_PRESETS, preset_for
from trainer.config.resolve import overrides_of, resolve
from trainer.errors import ConfigError
from trainer.machine import hardware
from trainer.machine.console import Console, folded, spoken, table
from trainer.machine.installed_files import train_here
from trainer.machine.safe_text import print
from trainer.model.shapes import shape_of
from trainer.plan import hours, memory_check, preflight, search
from trainer.plan.cards import card_of, common
from trainer.plan.planner import GB, ROOMY, Plan
from trainer.plan.search import Placement

VERDICTS = {
    "fits": ("it fits", "bold green"),
    "tight": ("it may not fit", "bold yellow"),
    "too large": ("it does not fit", "bold red"),
    "no ram": ("it fits the card, but not the RAM of this machine", "bold red"),
}
LARGEST = {"rows": "rows", "max_new_tokens": "new tokens", "tokens_per_micro_batch": "tokens a micro-batch"}
BELOW: dict[str, Any] = {"width": 56, "initial_indent": "  ", "subsequent_indent": "  ", "break_on_hyphens": False}
WORTH = 0.95  # the search changes a run that fits only if it then takes less than this share of its time


@dataclass(frozen=True)
class Question:
    """A run to plan, and the command that would start it."""

    placement: Placement
    size: str  # memory of the card, and where that number comes from
    card: str  # name of the card whose speed is assumed if none is given
    command: Sequence[str]
    free_ram: int  # of this machine
    options: Namespace
    proposal: Sequence[str] | None = None  # settings that the search has changed

    @cached_property
    def time(self) -> hours.Estimate | None:
        return hours.estimate(self.options, self.placement, self.card)

    @property
    def ram_fits(self) -> bool:
        return self.placement.plan.ram_peak <= self.placement.ram


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet plan --preset 8gb --vram 6 --search"
    add_settings_of_a_run(parser)
    parser.add_argument("--model", help="a hub id, a folder, or nano; by default that of the preset")
    parser.add_argument("--vram", type=float, metavar="GB", help="memory of the card; by default of this machine")
    parser.add_argument("--gpus", type=positive, metavar="N", help="cards in a machine; by default those here")
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="machines that share the work")
    parser.add_argument("--group", type=int, metavar="G", help="the same as rollout.group_size=G")
    parser.add_argument("--completion", type=int, metavar="N", help="the same as rollout.max_new_tokens=N")
    parser.add_argument("--prompt", type=int, metavar="N", help="the same as prompt.max_tokens=N")
    parser.add_argument("--search", action="store_true", help="propose settings that fit, or that use more of the card")
    hours.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(options: Namespace) -> None:
    """Print the plan, and exit with status 1 if the run cannot fit. Or print the models that fit a card."""
    console = Console()
    console.soft_wrap = not console.is_terminal
    named = options.preset or options.model or any(text.startswith("model.name=") for text in options.overrides)
    if not named and not options.search and (options.vram is not None or options.card is not None):
        show_models(options, console)
        return
    question = ask(options)
    if options.search:
        question = searched(question)
    if options.json:
        print(json.dumps(document(question), indent=2))
    else:
        for part in (title(question), *phases(question.placement.plan, console.width), *answer(question)):
            console.print(part)
    if question.placement.plan.verdict == "too large" or not question.ram_fits:
        sys.exit(1)


def show_models(options: Namespace, console: Console) -> None:
    """Print the models that fit a card, the best first, with their memory and the hours of a preset's run."""
    questions = []
    for name in search.CHOICES:
        question = ask(Namespace(**{**vars(options), "model": name}))
        if question.placement.plan.fits:
            questions.append(question)
        elif question.placement.search():
            questions.append(searched(question))
    if options.json:
        print(json.dumps([document(question) for question in questions], indent=2))
        sys.exit(0 if questions else 1)
    if not questions:
        smallest = question.placement  # the last one
        least = next(size for size in count(1) if replace(smallest, vram=size * GB, ram=inf).search())
        console.print(f"Nothing fits {question.size}. The smallest of the known models, {name}, needs {least} GB.")
        sys.exit(1)
    rows = []
    for question in questions:
        placement, time = question.placement, question.time
        about = [*spoken(time.about), str(time.steps)] if time and time.hours else ["?", "?"]
        rows.append([placement.config.model.name, f"{placement.plan.peak / GB:.1f}", *about])
        rows += [[line, "", "", ""] for line in wrap(shlex.join(question.proposal or []), **BELOW)]
    console.print(table(("model, with settings", "GB", "about", "steps"), rows))
    times = f", times {time.basis}" if time and (options.vram is not None or options.like) else ""
    console.print(f"\nOn {questions[0].size}{times}.")
    command = shlex.join(["octet", "plan", "--model", "NAME", *options.words])
    console.print(f"{command} shows the whole plan and the command.")


def ask(options: Namespace) -> Question:
    machine = hardware.detect()
    vram, size, card = _card(options, machine)
    preset = options.preset or ("nano" if options.model == "nano" else preset_for(vram) or "8gb")
    named = {"model.name": options.model, "rollout.group_size": options.group, "prompt.max_tokens": options.prompt}
    overrides = overrides_of(named | {"rollout.max_new_tokens": options.completion}) + options.overrides
    config = resolve(preset, options.recipe, overrides)
    elsewhere = options.vram is not None or options.card is not None  # the named card may be in another machine
    is_here = not elsewhere and options.gpus is None
    ranks, local = (1, 1) if elsewhere else hardware.ranks(machine)
    if options.gpus is not None:
        ranks = local = options.gpus
    if not is_here or machine.gpus:
        there = tuple(hardware.Gpu(index, "", card, vram) for index in range(local))
        cards = machine if is_here else hardware.Hardware(there, machine.cores)
        preflight.complain([*preflight.bf16_products(config, cards)])
        if config.rollout.vllm.start and (is_here or options.gpus):  # whose servers have cards of their own
            ranks = local = len(preflight.training_cards(cards, config.rollout.vllm).gpus)
    if options.nodes > 1:
        if config.rollout.vllm.start:
            remedy = "Start them yourself, and write rollout.vllm.urls"
            raise ConfigError("rollout.vllm.start=true", "its servers listen on one machine only", remedy)
        elsewhere, ranks = True, options.nodes * local
    free, shape = hardware.free_ram(), shape_of(config.model.name, config.model.revision)
    placement = Placement(shape, config, ranks, round(vram * GB), inf if elsewhere else free, local)
    _refuse_what_a_run_refuses(placement)
    command = _command(options, preset, overrides)
    if options.nodes > 1:
        command[: len(shlex.split(train_here()))] = ["octet", "slurm", f"--nodes={options.nodes}", f"--gpus={local}"]
    return Question(placement, size, card, command, free, options)


def _command(options: Namespace, preset: str, overrides: Sequence[str]) -> list[str]:
    return [*shlex.split(train_here()), *words_of(preset, options.recipe, overrides)]


def _card(options: Namespace, machine: hardware.Hardware) -> tuple[float, str, str]:
    """Return the GB of the card, a description of them, and the name of the card whose speed is assumed."""
    if options.card is not None:
        hours.must_know(options.card)
    if options.vram is not None:
        if not 0 < options.vram < inf:
            remedy = "Write its GB, such as --vram 8"
            raise ConfigError(f"--vram {options.vram:g}", "that is not the size of a card", remedy)
        return options.vram, f"{options.vram:g} GB", common(options.vram)
    if options.card is not None and (card := card_of(options.card)):
        larger = card_of(card.larger)
        if larger and larger.memory_gb == GPU_PRESETS.get(options.preset):
            card = larger
        return card.memory_gb, card.size, card.name
    if machine.gpus:
        return machine.memory_gb, str(machine), machine.gpus[0].name
    size = GPU_PRESETS.get(options.preset, search.WITHOUT_A_CARD)
    is_for_a_card = options.preset in (None, *GPU_PRESETS)
    return size, f"{size} GB (no GPU was found; --card names one)", common(size) if is_for_a_card else ""


def _refuse_what_a_run_refuses(placement: Placement) -> None:
    config, new_tokens = placement.config, placement.completion
    ds_config.check(config, has_gpu=True)
    config.refuse_idle(placement.world_size)
    if reason := memory_check.no_layer_to_adapt(placement) or memory_check.too_little_for_vllm(placement):
        raise ConfigError(reason)
    if new_tokens > placement.longest_answer:
        context, prompts = placement.shape.context, f"prompts of up to {config.prompt.max_tokens} tokens"
        reason = f"the context of this model is {context}, and {prompts} have to be in it as well"
        remedy = f"Write --completion {placement.longest_answer} or less, or a smaller --prompt"
        raise ConfigError(f"rollout.max_new_tokens={new_tokens}", reason, remedy)


def searched(question: Question) -> Question:
    """Return the question with what the search proposes. Raise ConfigError if it finds nothing."""
    placement = question.placement
    if not placement.plan.fits and (shipped := _shipped(question)):
        return shipped
    found = placement.search()
    if found is None:
        and_ram = "" if placement.ram == inf else f" and the {question.free_ram / GB:.1f} GB of RAM that are free"
        config, on = placement.config, f"{placement.vram / GB:g} GB{and_ram}"
        texts = f"prompts of {config.prompt.max_tokens} and answers of {config.rollout.max_new_tokens} tokens"
        tried = f"with {texts}, it is too large even with one answer at a time and every other setting tried"
        reason = f"nothing makes {config.model.name} fit {on}: {tried}"
        least = config.changed({"prompt.max_tokens": 1, "rollout.max_new_tokens": 1})
        shorten = "Shorten them. " if replace(placement, config=least).search() else ""
        raise ConfigError("--search", reason, f"{shorten}{placement.nearest()}")
    fuller = replace(placement, config=placement.grown(found))
    now, then = question.time, replace(question, placement=fuller).time
    if found != placement.config or not now or not then or then.about < WORTH * now.about:
        found = fuller.config
    changes = search.difference(placement.config, found)
    keys = {change.partition("=")[0] for change in changes}
    kept = [part for part in question.command if part.partition("=")[0] not in keys]
    placement = replace(placement, config=found)
    return replace(question, placement=placement, command=[*kept, *changes], proposal=changes)


def _shipped(question: Question) -> Question | None:
    """Return the question for the preset that is made for this model, if it fits the card. It would drop the settings
    of any other preset, such as the task in a file of the user's own."""
    options, placement = question.options, question.placement
    if options.nodes > 1 or options.preset not in (None, *GPU_PRESETS):
        return None
    others = [text for text in question.command if "=" in text and not text.startswith("model.name=")]
    for name, size in GPU_PRESETS.items():
        try:
            config = resolve(name, options.recipe, others)
        except ConfigError:  # this preset excludes some of these settings
            continue
        if config.model.name.lower() != placement.config.model.name.lower() or name in question.command:
            continue
        found = replace(placement, config=config)
        if size * GB <= 1.07 * placement.vram and found.fits(found.config):
            command = _command(options, name, others)
            return replace(question, placement=found, command=command, proposal=["--preset", name])
    return None


def title(question: Question) -> Text:
    placement, config = question.placement, question.placement.config
    lora, rollout, ranks = config.lora, config.rollout, placement.world_size
    how = f"LoRA r={lora.r}" if lora.enabled else "the whole model"
    precision = config.model.quantize if config.model.quantize != "none" else config.model.dtype.replace("auto", "bf16")
    checkpoints = "with" if config.model.gradient_checkpointing else "without"
    shape = placement.shape
    active = f" ({_count(shape.active)} of them for each token)" if shape.active < shape.parameters else ""
    by_vllm = " by vLLM in this process" if config.rollout.engine == "vllm_colocate" else ""
    return Text.assemble(
        (config.model.name, "bold"),
        f" on {question.size}{f', one of {ranks}' if ranks > 1 else ''}\n"
        f"{_count(shape.parameters)} parameters{active} in {precision}, {_count(placement.trained)} trained ({how})\n"
        f"engine {config.engine.ds_config}, {checkpoints} gradient checkpointing\n"
        f"a step: {rollout.problems} x {rollout.group_size} answers of up to {rollout.max_new_tokens:,} tokens to "
        f"prompts of up to {placement.prompt:,}\n"
        f"at once: {placement.rows} answers sampled{by_vllm}, {config.optim.tokens_per_micro_batch:,} tokens trained\n",
    )


def _count(number: float) -> str:
    return f"{number / GB:.2f} B" if number >= GB / 10 else f"{number / 10**6:.2f} M"


def phases(plan: Plan, width: int) -> Iterator[Table]:
    """Yield a table of memory by phase and purpose, or several if it is wider. Purposes are in order of first use,
    overheads last."""
    names = dict.fromkeys(name for terms in plan.phases.values() for name in terms)
    ordered = sorted(names, key=lambda name: name in ("allocator slack", "CUDA context"))
    rows = [(name, [terms.get(name, 0) for terms in plan.phases.values()]) for name in ordered]
    rows.append(("peak", [plan.peak_of(phase) for phase in plan.phases]))
    return folded(["GB", *plan.phases], [[name, *map(_size, sizes)] for name, sizes in rows], width)


def _size(size: float) -> str:
    return f"{size / GB:.2f}" if size >= GB / 200 else "<0.01" if size else "-"


def answer(question: Question) -> Iterator[str | Text]:
    placement, plan = question.placement, question.placement.plan
    most = plan.phases[plan.peak_phase][plan.dominant]
    yield Text.assemble(
        "\n",
        VERDICTS["no ram" if plan.fits and not question.ram_fits else plan.verdict],
        f": {plan.peak / GB:.1f} of {plan.vram / GB:.1f} GB ({plan.peak / plan.vram:.0%}) in "
        f"{plan.peak_phase}; most of it is {plan.dominant}, {most / GB:.2f} GB",
    )
    if experts := placement.item * placement.shape.total(lambda block: block.experts * block.expert):
        how = "in 16 bits whatever model.quantize says, and also where their files have 4 (mxfp4)"
        yield f"experts: {experts / GB:.2f} GB of the weights, {how}"
    parts = ", ".join(f"{name} {size / GB:.1f}" for name, size in plan.ram_terms.items())
    each, here = " for each machine", f"; {question.free_ram / GB:.1f} GB are free here"
    is_one = question.options.nodes == 1
    yield Text.assemble(
        f"RAM: {plan.ram_peak / GB:.1f} GB{'' if is_one else each} ({parts}){here if is_one else ''}",
        "" if question.ram_fits else Text.assemble(", ", ("more than this machine has", "bold red")),
    )
    yield f"optimizer offload saves {placement.state / GB:.2f} GB of the card"
    yield from _limits(placement)
    time = question.time
    yield f"time: {time or 'not known for this machine; name a --card, or an earlier run with --like'}"
    if time and (shorter := hours.shorter(time)):
        yield f"  {shorter}"
    if question.proposal is None and not placement.fits(placement.config):
        if placement.search() is None:
            yield placement.nearest()
        else:
            question = searched(question)
    if question.proposal is not None:
        yield Text.assemble("proposed: ", (shlex.join(question.proposal) or "nothing to change", "bold"))
        yield Text(f"  {shlex.join(question.command)}", no_wrap=True, overflow="ignore")
    yield Text(f"For the longest prompts and answers; below {ROOMY:.0%} of a card counts as fitting.", "dim")


def _limits(placement: Placement) -> Iterator[str]:
    found = placement.limits()
    whole = {"rows": placement.all_rows, "tokens_per_micro_batch": placement.most_tokens}
    all_of = {name: " (all of a step)" if found[name] == whole.get(name) else "" for name in LARGEST}
    if parts := [f"{found[name]:,} {what}{all_of[name]}" for name, what in LARGEST.items() if found[name]]:
        yield f"the most that fits if only one of these is changed:\n  {', '.join(parts)}"


def document(question: Question) -> dict[str, Any]:
    placement, plan, time = question.placement, question.placement.plan, question.time
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
        "ram_free_bytes": question.free_ram,
        "ram_fits": question.ram_fits,
        "peak_bytes": plan.peak,
        "peak_phase": plan.peak_phase,
        "dominant": plan.dominant,
        "verdict": plan.verdict,
        "largest": placement.limits(),
        "optimizer_offload_saves": round(placement.state),
        "time": time and {**time._asdict(), "about": time.about},
        "proposal": question.proposal,
        "command": shlex.join(question.command),
    }
