"""`octet doctor`: check whether this machine can run these settings, and print what to do if it cannot.

The checks are those that every run makes at its start (plan/preflight.py). Meanwhile a separate process tests torch.
"""

import importlib.util
import json
import os
import platform
import shlex
import shutil
import sys
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from rich.text import Text

from trainer.commands.shared_options import add_settings_of_a_run
from trainer.config import ds_config
from trainer.config.choose_preset import choose_preset
from trainer.config.resolve import resolve
from trainer.config.settings import RUNS, Code, Config, Model
from trainer.errors import Finding, OctetError, counted
from trainer.machine import hardware
from trainer.machine.console import Console
from trainer.machine.disk import amount
from trainer.machine.installed_files import CHECKOUT, CONSTRAINTS, IS_INSTALLED, in_a_process, packages_needed
from trainer.machine.safe_text import print
from trainer.model import hub
from trainer.plan import downloads, memory_check, preflight, read_data
from trainer.problem import datasheet
from trainer.problem.task import make_task
from trainer.reward import make
from trainer.reward.programs import Programs
from trainer.sandbox.confine import Limits
from trainer.sandbox.pool import Sandbox

MARKS = {"note": ("✓", "green"), "warn": ("!", "yellow"), "end": ("✗", "red")}  # symbol and colour of a severity
NAME, WIDTH = 14, 100
PATIENCE_S = 300.0  # for the tests of torch, whose import takes long on a slow disk


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = (
        "example: octet doctor --preset 8gb. "
        "Exit status: 0 if such a run can start, 1 if something prevents it, 2 for a mistake in the settings."
    )
    add_settings_of_a_run(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: Namespace) -> None:
    """Print each finding as soon as it is known, and exit with status 1 if one is a problem."""
    preset, why = (options.preset, "") if options.preset else choose_preset(hardware.detect())
    config = resolve(preset, options.recipe, options.overrides)
    title = " ".join([f"preset {preset}", *([options.recipe] if options.recipe else []), *options.overrides])
    title += f" ({why})" if why else ""
    findings, console = [], Console()
    console.soft_wrap = not console.is_terminal
    if not options.json:
        console.print(f"octet doctor: {title}\n")
    for finding in everything(config):
        findings.append(finding)
        if not options.json:
            console.print(line(finding, console.width if console.is_terminal else WIDTH))
    count = {severity: sum(finding.severity == severity for finding in findings) for severity in MARKS}
    warnings = counted(count["warn"], "warning")
    if options.json:
        print(json.dumps({"for": title, **count, "findings": [asdict(finding) for finding in findings]}, indent=2))
    elif count["end"]:
        problems = counted(count["end"], "problem")
        console.print(f"\n{problems}, {warnings}: such a run cannot start, or would not end well.")
    else:
        console.print(f"\nNo problem, {warnings}: such a run can start.")
    if count["end"]:
        sys.exit(1)


def line(finding: Finding, width: int) -> Text:
    """Return a finding wrapped to the width of the screen, or to 100 columns, with its remedy below."""
    (mark, colour), indent = MARKS[finding.severity], " " * (NAME + 3)
    wrapped = partial(textwrap.wrap, width=max(min(width, WIDTH), 40), break_long_words=False, break_on_hyphens=False)
    rows = wrapped(finding.seen, initial_indent=f"{mark} {finding.name:<{NAME}} ", subsequent_indent=indent)
    rows += wrapped(finding.remedy, initial_indent=f"{indent}> ", subsequent_indent=f"{indent}  ")
    text = Text("\n".join(rows))
    text.stylize(colour, 0, len(mark))
    return text


def everything(config: Config) -> Iterator[Finding]:
    command = in_a_process(start="from trainer.plan.torch_probe import main; main()")
    with Popen(command, text=True, stdout=PIPE, stderr=PIPE) as probe:
        machine = hardware.detect()
        yield python_and_packages()
        yield from visible_cards(config.model, machine)
        yield from settings(config, machine)
        vllm = "installed" if importlib.util.find_spec("vllm") else "not installed; only some settings need it"
        yield Finding("note", "vLLM", vllm)
        yield Finding("note", "Slurm", shutil.which("sbatch") or "not on this machine; optional")
        yield sandbox(config.reward.code if "code" in config.reward.weights else None)
        yield from of_torch(config, probe, machine)


def python_and_packages() -> Finding:
    """Compare the installed versions with those of constraints.txt, which were tested together."""
    required = [line.partition(">")[0] for line in packages_needed()]
    found = {name: next(iter(distributions(name=name)), None) for name in required}
    installed = {name: one.version for name, one in found.items() if one and one.version}
    if missing := [name for name in required if name not in installed]:
        script = os.path.relpath(CHECKOUT / "run_deepspeed.sh")
        remedy = f"{'' if IS_INSTALLED else f'bash {script} --dry-run installs them, or '}{_reinstall()}"
        return Finding("end", "packages", f"not installed: {', '.join(missing)}", remedy)
    tried, python = pinned(CONSTRAINTS), f"Python {platform.python_version()}"
    # 2.13.0+cpu is a build of 2.13.0
    others = [name for name, own in installed.items() if own.partition("+")[0] != tried[name]]
    if others := [f"{name} {installed[name]} (tried: {tried[name]})" for name in others]:
        text = f"{python}; versions other than those that were tried together: {', '.join(others)}"
        return Finding("warn", "packages", text, f"If something fails: {_reinstall()}")
    return Finding("note", "packages", f"{python}, and {len(required)} packages in the versions of constraints.txt")


def _reinstall() -> str:
    what = ["octet-grpo"] if IS_INSTALLED else ["-e", os.path.relpath(CHECKOUT)]
    return shlex.join(["pip", "install", "-c", os.path.relpath(CONSTRAINTS), *what])


def pinned(constraints: Path) -> dict[str, str]:
    """Return the versions that a constraints file pins for this Python."""
    from packaging.requirements import Requirement

    pins = [Requirement(line) for line in constraints.read_text().splitlines() if line and not line.startswith("#")]
    return {pin.name.lower(): str(pin.specifier)[2:] for pin in pins if pin.marker is None or pin.marker.evaluate()}


def visible_cards(model: Model, machine: hardware.Hardware) -> Iterator[Finding]:
    if not machine.gpus:
        slow = model.name != "nano"
        remedy = "That takes days for a model of a billion parameters; --preset nano takes a minute." if slow else ""
        text = f"no GPU: training on {counted(machine.cores, 'CPU core')}"
        yield Finding("warn" if slow else "note", "card", text, remedy)
        return
    for gpu in machine.gpus:
        yield from preflight.card(model.dtype, gpu)
    if state := next((gpu.state for gpu in machine.gpus if gpu.state), None):
        has_bf16 = state.capability >= preflight.BF16_CAPABILITY
        precision = "bf16" if has_bf16 else "no bf16: model.dtype=auto takes fp16, with loss scaling"
        yield Finding("note", "precision", f"compute capability {state.capability:g}, {precision}")
        cuda = hardware.driver_cuda() or "(not known)"
        yield Finding("note", "driver", f"{state.driver}, which runs programs built for CUDA {cuda}")


def settings(config: Config, machine: hardware.Hardware) -> Iterator[Finding]:
    """Check model, data and settings as a run does, and whether card, disk and RAM are large enough."""
    found = teacher = hub.NOTHING
    problems = list[Finding]()

    @contextmanager
    def noting(name: str) -> Iterator[None]:
        try:
            yield
        except OctetError as error:
            problems.append(Finding.of("end", name, str(error)))

    with noting("model"):
        found = hub.find_model(config.model)
        yield Finding("note", "model", f"{config.model.name}: {_where(found)}")
    with noting("adapter"):
        downloads.find_adapters(config)
    with noting("teacher"):
        teacher = downloads.find_teacher(config.teacher_model)
        if config.teacher_model:
            yield Finding("note", "teacher", f"{config.teacher.name}: {_where(teacher)}")
    with noting("data"):
        yield data(config)
        # of_torch() tests the packages that are installed
        yield from (finding for finding in preflight.packages(config) if finding.severity == "end")
    with noting("settings"):
        preflight.must_be_usable(config)
        make.check(config.reward)
        ours = preflight.training_cards(machine, config.rollout.vllm)
        ds_config.check(config, has_gpu=bool(ours.gpus))
        config.refuse_idle(max(1, len(ours.gpus)))
        yield from preflight.bf16_products(config, ours)
        yield from preflight.adapter(config)
        yield from preflight.answers(config)
        yield from memory_check.findings(config, ours)
        if found.sizes:  # else the model was not found, so its needs are unknown
            wanted = preflight.needs(config, found, ours, teacher)
            yield from preflight.disk(wanted, config.run.dir or RUNS)
            yield preflight.ram(config, wanted, hardware.free_ram())
        yield from preflight.idle(config)  # which may fail on missing data, as above
    yield from problems


def _where(found: hub.Found) -> str:
    if found.folder is None:
        return f"on the hub, {amount(found.download)} to download"
    return f"{amount(found.weights)} of weights in {found.folder}"


def data(config: Config) -> Finding:
    settings = config.task
    if sets := make_task(settings).hub_sets():
        cached = [downloads.find_data(one, settings) for one in sets]
        place = f"in the cache, {downloads.data_cache()}" if all(cached) else "on the hub, which answers"
        return Finding("note", "data", f"{settings.name}: {place}")
    if settings.own_data:
        if (found := datasheet.finding(settings)).severity != "end":
            read_data.read(config)  # raises an error for tests and gold answers that a run refuses
        return found
    return Finding("note", "data", f"{settings.name}: on this machine")


def sandbox(code: Code | None) -> Finding:
    """Report how this machine can confine programs, which only the reward `code` needs."""
    try:
        grader = Programs(code) if code else None
        with grader.sandbox if grader else Sandbox(Limits()) as started:
            held = started.held
    except OctetError as error:
        if code:
            return Finding.of("end", "sandbox", str(error))
        return Finding("warn", "sandbox", f"programs that a model writes cannot run here: {error}")
    how = f"are confined by {held}" if held.is_enough else f"cannot be confined: {held}{'; optional' * (code is None)}"
    if code and grader:
        threads = counted(code.processes if held.counted else 1, "thread")
        how += f"; {grader.at_once} run at once, each with at most {threads}"
    return Finding("note", "sandbox", f"programs that a model writes {how}")


def of_torch(config: Config, probe: Popen[str], machine: hardware.Hardware) -> Iterator[Finding]:
    try:
        output, errors = probe.communicate(timeout=PATIENCE_S)  # reads both pipes: a full one would block the probe
    except TimeoutExpired:
        probe.kill()
        remedy = "Restart the machine if nvidia-smi hangs in a terminal, too."
        yield Finding("end", "torch", f"it has not answered for {PATIENCE_S:g} seconds", remedy)
        return
    for row in output.splitlines():
        facts = json.loads(row)
        if "torch" in facts:
            yield build(facts, machine, hardware.driver_cuda() if machine.gpus else None)
        else:
            yield bitsandbytes(facts["trouble"], config)
    if probe.returncode != 0:
        last = "".join(errors.strip().splitlines()[-1:])
        constraints = shlex.quote(os.path.relpath(CONSTRAINTS))
        remedy = f"pip install --force-reinstall -c {constraints} torch bitsandbytes"
        yield Finding("end", "torch", f"it ended with status {probe.returncode}: {last}", remedy)


def build(facts: Mapping[str, Any], machine: hardware.Hardware, driver_cuda: str | None) -> Finding:
    """Report whether this build of torch computes on these cards."""
    name, cuda = f"torch {facts['torch']}", facts["cuda"]
    if not machine.gpus:
        return Finding("note", "torch", f"{name}, on the CPU")
    if cuda is None:
        return Finding("end", "torch", f"{name} is built without CUDA", "pip install the build for CUDA.")
    if driver_cuda and int(cuda.partition(".")[0]) > int(driver_cuda.partition(".")[0]):
        text = f"{name} is built for CUDA {cuda}, and the driver runs CUDA {driver_cuda}"
        return Finding("end", "torch", text, f"Update the driver, or install a torch for CUDA {driver_cuda}.")
    if facts["trouble"] or not facts["gpu"]:
        text = f"{name}, built for CUDA {cuda}, does not compute on the card: {facts['trouble'] or 'it sees none'}"
        return Finding("end", "torch", text, "Update the driver, or install a torch that knows this card.")
    return Finding("note", "torch", f"{name}, built for CUDA {cuda}, computes on the card")


def bitsandbytes(trouble: str, config: Config) -> Finding:
    if not trouble:
        return Finding("note", "bitsandbytes", "4-bit weights and 8-bit optimizer work")
    for setting, other in preflight.needs_bitsandbytes(config):
        text = f"{setting}: bitsandbytes does not work here: {trouble}"
        return Finding("end", "bitsandbytes", text, f"Write {other}.")
    return Finding("note", "bitsandbytes", f"does not work here, and these settings do not need it: {trouble}")
