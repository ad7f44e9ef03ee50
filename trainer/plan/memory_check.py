"""Find out before anything is downloaded whether a run can fit this machine, and whether memory will be short."""

from collections.abc import Iterator
from dataclasses import replace
from operator import attrgetter

from trainer.config.resolve import overrides_of
from trainer.config.sections.model import ENDS
from trainer.config.settings import Config
from trainer.errors import Finding, counted
from trainer.machine import hardware
from trainer.model.shapes import Shape, planned_shape
from trainer.plan.planner import GB, SLEEPING, TAUGHT, TIGHT, Planner
from trainer.plan.search import Placement, difference

LARGEST_ON_A_CPU = GB // 2  # parameters; with more, a step takes many minutes
# The setting that decides about each term of the RAM.
TAKES_RAM = {
    "optimizer state": "engine.ds_config",
    "weights": "engine.ds_config",
    "activations": "model.activation_offload",
    SLEEPING: "rollout.vllm.sleep",
    TAUGHT: "teacher.name",
}


def findings(config: Config, machine: hardware.Hardware) -> Iterator[Finding]:
    """Yield whether a run, and its warm-up, can fit. Nothing is yielded for a model of unknown shape, and nothing about
    a run whose warm-up cannot fit, because the reason is mostly the same."""
    if config.warmup.steps and not config.is_warmup:
        for one in findings(config.warmed_up_in(config.run.dir), machine):
            if one.severity != "note":
                yield replace(one, name="warm-up")
            if one.severity == "end":
                return
    if (shape := planned_shape(config.model)) is None:
        return
    world_size, local_size = hardware.ranks(machine)
    placement = Placement(shape, config, world_size, int(machine.memory_gb * GB), hardware.free_ram(), local_size)
    if reason := _problem(placement, machine):
        yield Finding.of("end", "plan", reason)
    elif short := _warning(placement, machine):
        yield Finding.of("warn", "plan", short)
    else:
        yield Finding("note", "plan", "it fits; `octet plan` says what takes the memory")


def _warning(placement: Placement, machine: hardware.Hardware) -> str | None:
    """Return a warning if memory will be short, although the run can continue with smaller batches."""
    if not machine.gpus or placement.plan.fits:
        return None
    found = placement.search()
    remedy = f" What fits: {' '.join(difference(placement.config, found))}" if found else ""
    return (
        f"memory will be short: {placement.plan.peak / GB:.1f} GB are planned, and the card has "
        f"{machine.memory_gb:.1f} GB. If it runs out, the run continues with smaller batches.{remedy}"
    )


def _problem(placement: Placement, machine: hardware.Hardware) -> str | None:
    """Return why the run cannot work on this machine, and settings that can; None if it may."""
    if reason := no_layer_to_adapt(placement):
        return reason
    if not machine.gpus:
        return _too_slow_on_a_cpu(placement.config, machine, placement.shape)
    return too_little_for_vllm(placement) or _too_large_for_the_card(placement) or _too_large_for_ram(placement)


def no_layer_to_adapt(planner: Planner) -> str | None:
    """Return an error if a name of lora.targets is not that of a layer, or if two layers are one."""
    model = planner.config.model
    own = {"model.embeddings=cpu": model.embeddings == "cpu", "model.quantize_head=int8": model.quantize_head == "int8"}
    if setting := next((name for name, is_there in own.items() if is_there and planner.shape.tied), ""):
        return f"{setting}: the embedding and the output layer of {model.name} share a weight. Leave the setting out."
    missing = [name for name in planner.targets if name not in (*planner.adaptable, *ENDS)]
    return planner.config.lora.without_layer(missing, planner.adaptable) if missing else None


def too_little_for_vllm(placement: Placement) -> str | None:
    """Return an error if vLLM's share of the card cannot hold the base and one answer."""
    config, vram = placement.config, placement.vram
    share, least = config.rollout.vllm.memory, placement.vllm_at_least
    if config.rollout.engine != "vllm_colocate" or not share or share * vram >= least:
        return None
    return (
        f"rollout.vllm.memory={share:g}: that is {share * vram / GB:.1f} GB of the card, and vLLM needs "
        f"{least / GB:.1f} GB for the base and one answer. Leave it out, which gives vLLM what it needs."
    )


def _too_large_for_the_card(placement: Placement) -> str | None:
    """Return an error if even one answer at a time does not fit, without merged copies: the least to which a run that
    runs out of memory shrinks."""
    config = placement.config
    plan = replace(placement, config=config.changed({"rollout.rows": 1, "optim.tokens_per_micro_batch": 1})).plan
    terms = plan.phases[plan.peak_phase]
    least = plan.peak - terms.get("merged copies", 0)
    if least <= TIGHT * placement.vram:
        return None
    return (
        f"model.name={config.model.name}: even one answer at a time takes {least / GB:.1f} GB ({plan.dominant} "
        f"{terms[plan.dominant] / GB:.1f} GB), and the card has {placement.vram / GB:.1f} GB. {placement.nearest()}"
    )


def _too_large_for_ram(placement: Placement) -> str | None:
    terms, peak = placement.plan.ram_terms, placement.plan.ram_peak
    if peak <= placement.ram:
        return None
    key = TAKES_RAM.get(max(terms, key=lambda name: terms[name]), "model.name")
    (setting,) = overrides_of({key: attrgetter(key)(placement.config)})
    return (
        f"{setting}: {peak / GB:.1f} GB of CPU memory are needed "
        f"({', '.join(f'{name} {size / GB:.1f} GB' for name, size in terms.items())}), and {placement.ram / GB:.1f} GB "
        f"are free. {placement.nearest()}"
    )


def _too_slow_on_a_cpu(config: Config, machine: hardware.Hardware, shape: Shape) -> str | None:
    if shape.parameters <= LARGEST_ON_A_CPU or config.model.dtype != "auto":
        return None
    return (
        f"model.name={config.model.name}: no GPU was found, and with {shape.parameters / GB:.1f} B parameters on "
        f"{counted(machine.cores, 'CPU core')} a step takes many minutes. Write --preset nano, a model.name of at "
        "most 0.5 B, or model.dtype=fp32 if that is what you want."
    )
