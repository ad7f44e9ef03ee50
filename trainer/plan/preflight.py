"""Checks of settings, disk, RAM, cards, packages and model, before anything heavy is imported, and the division of the
cards between the policy and the vLLM servers that the run starts.

Every run makes the checks at its start and prints errors and warnings; `octet doctor` prints every finding.
"""

import atexit
import gc
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainer.config import ds_config
from trainer.config.read_yaml import written
from trainer.config.resolve import flat
from trainer.config.sections.task import TOOLS
from trainer.config.settings import RUNS, Config, Vllm
from trainer.errors import ConfigError, Finding
from trainer.machine import hardware, quiet
from trainer.machine.disk import amount
from trainer.machine.disk import size as size_of
from trainer.machine.installed_files import pip_install
from trainer.machine.safe_text import print
from trainer.model import fast_imports
from trainer.model.hub import NOTHING, Found, cache
from trainer.model.shapes import planned_shape
from trainer.plan import downloads, memory_check
from trainer.plan.planner import MOMENTS, PROCESS, Planner
from trainer.problem.task import DataTask, make_task
from trainer.problem.tools import tools_of
from trainer.reward import make
from trainer.run_folder import changed_settings

CHECKED = "OCTET_CHECKED"  # environment variable that the launcher sets for its processes after these checks
WHOLE_LR = 1e-3  # warn above this learning rate if the whole model is trained
BUSY_GB = 1.0  # warn if other programs use more of the card; a desktop uses less
BF16_CAPABILITY = 8.0  # Ampere
OLDEST_CAPABILITY = 7.5  # Turing, the oldest one with kernels in torch's builds for CUDA 13

# Each row has a setting, or starts of several names, a condition under which it has an effect, and a remedy.
# fmt: off
SWITCHES: list[tuple[str | tuple[str, ...], Callable[[Config], object], str]] = [
    *((f"reward.{name}", lambda c, name=name: name in c.reward.all_weights, f"Write reward.weights.{name}=1.0 as well")
      for name in ("code", "judge", "length", "overlong", "repetition")),
    ("teacher", lambda c: c.teacher.is_there, "Write teacher.name=MODEL as well"),
    ("rollout.vllm", lambda c: c.rollout.uses_vllm or c.teacher.url or c.is_warmup,  # a warm-up replaces engines
     "Write rollout.engine=vllm_colocate, or rollout.vllm.start=true"),
    ("rollout.turns", lambda c: c.task.tools or c.task.agent or any(one.environment for one in make_task(c.task).parts),
     "Write task.tools=calculator as well, or a task with an environment"),
    (("warmup.from", "warmup.then"), lambda c: c.warmup.steps or (c.run.dir and (c.run.dir / "warmup").exists()),
     "Write warmup.steps=200 as well"),
    (("warmup.asked", "warmup.keep"), lambda c: c.warmup.source == "samples", "Write warmup.from=samples as well"),
    (("algorithm.kl.estimator", "algorithm.kl.where"), lambda c: c.algorithm.kl.coef,
     "Write algorithm.kl.coef=0.04 as well"),
    ("algorithm.gradreg", lambda c: c.algorithm.gradreg.strength, "Write algorithm.gradreg.strength=0.003 as well"),
    (("optim.betas", "optim.max_grad_norm"), lambda c: c.optim.name != "muon", "Leave it out: muon has none"),
    (("reward.timeout", "reward.custom_format"), lambda c: c.reward.custom, "Write reward.custom=FILE.py:FUNCTION"),
    ("rollout.refills", lambda c: c.rollout.dead_groups == "refill", "Write rollout.dead_groups=refill as well"),
    ("prompt.shots", lambda c: "few_shot" in (c.prompt.style, make_task(c.task).prompt_style),
     "Write prompt.style=few_shot as well"),
    *((f"task.{name}", lambda c: "multiple_choice" in (c.task.name, *c.task.mix), "Write task.name=multiple_choice")
      for name in ("choices", "incorrect")),
    ("task.incorrect", lambda c: c.task.choices is None, "Leave it out: task.choices names all choices"),
    ("task.seed", lambda c: "gsm8k-renumbered" in (c.task.name, *c.task.mix), "Write run.seed, which orders problems"),
    ("task.subset", lambda c: make_task(c.task).hub_sets() or Path(c.task.path or "-").expanduser().is_dir(),
     "Leave it out: it is for a data set on the hub, or in a folder"),
    ("task.holdout", lambda c: any(
        isinstance(part, DataTask) and part.sources["test"] is None for part in make_task(c.task).parts),
     "Leave it out: this task has a test set of its own"),
    ("algorithm.advantage", lambda c: c.algorithm.loss != "reinforce", "Write algorithm.loss=reinforce_baseline"),
    *((name, lambda c: c.algorithm.correction.level != "none", "Write algorithm.correction.level=token")
      for name in ("algorithm.correction.cap", "algorithm.correction.mode")),
    ("run.track_answers", lambda c: c.run.track, "Write run.track=wandb or run.track=trackio as well"),
    ("eval.samples", lambda c: c.eval.problems and not c.is_warmup, "Leave it out: this run would not sample them"),
]
# fmt: on

# Two thirds of the planned size of a process: a plan must suffice, but a refusal must be certain.
PROCESS_BYTES = PROCESS * 2 // 3


def check(config: Config, machine: hardware.Hardware) -> None:
    """Raise an error if a run with these settings cannot start on this machine: one ConfigError for all problems that
    findings() has found. Print each warning."""
    ds_config.check(config, has_gpu=bool(machine.gpus))
    make.check(config.reward)
    if os.environ.get(CHECKED):
        return
    complain([*memory_check.findings(config, machine)])
    must_be_usable(config)
    found = downloads.check(config)  # on every rank, because it may switch the process to offline mode
    downloads.find_adapters(config)
    teacher = downloads.find_teacher(config.teacher_model)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        complain(findings(config, found, machine, teacher))
        if found.download:
            print(f"octet: {config.model.name}: {amount(found.download)} to download", file=sys.stderr, flush=True)


def training_cards(machine: hardware.Hardware, vllm: Vllm) -> hardware.Hardware:
    """Return the machine without the cards of the vLLM servers that the run starts."""
    must_name_devices(machine, vllm)
    if not vllm.start or not vllm.devices:
        return machine
    here = [gpu.index for gpu in machine.gpus]
    left = tuple(gpu for gpu in machine.gpus if gpu.index not in vllm.devices)
    beyond = sorted({*vllm.devices} - {*here}) if "CUDA_VISIBLE_DEVICES" not in os.environ else []  # which hides cards
    if beyond or not left:
        reason = f"there is no card {beyond[0]}, of {here}" if beyond else f"no card is left to train on, of {here}"
        remedy = f"Name {'others' if beyond else 'fewer'}, or write rollout.engine=vllm_colocate, which shares a card"
        raise ConfigError(f"rollout.vllm.devices={[*vllm.devices]}", reason, remedy)
    return replace(machine, gpus=left)


def must_name_devices(machine: hardware.Hardware, vllm: Vllm) -> None:
    """Raise ConfigError if the machine has cards and the settings name none of them for the servers."""
    if vllm.start and machine.gpus and not vllm.devices:
        cards = f"{len(machine.gpus)} x {machine.gpus[0].name}"
        reason = f"this machine has {cards}, and the settings do not say which of them the servers use"
        shares = "rollout.engine=vllm_colocate without rollout.vllm.start, which shares a card"
        raise ConfigError("rollout.vllm.start=true", reason, f"Write rollout.vllm.devices=0, or {shares}")


def must_leave_our_cards(machine: hardware.Hardware, vllm: Vllm, ranks: int) -> None:
    """Raise ConfigError if policy and servers would share a card, as they may without Octet's launcher."""
    must_name_devices(machine, vllm)
    on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    ours = [] if on_cpu else [gpu.index for gpu in machine.gpus[:ranks]]
    if vllm.start and (both := sorted(set(ours) & set(vllm.devices))):
        reason = f"the policy is trained on the cards {ours}, so {both} would be used by both"
        remedy = "Start with ./run_deepspeed.sh, which keeps them apart, or hide cards with CUDA_VISIBLE_DEVICES"
        raise ConfigError(f"rollout.vllm.devices={[*vllm.devices]}", reason, remedy)


def must_be_usable(config: Config) -> None:
    """Raise ConfigError if the run folder is a file, cannot be written, or holds a run with other settings, and for a
    tool of the user that a model cannot call."""
    must_be_writable(config.run.dir or RUNS)
    tools_of([tool for tool in config.task.tools if tool not in TOOLS], config.rollout.turns.seconds)
    if config.run.dir:
        changed_settings.refuse_other_settings(config.run.dir, config)


def must_be_writable(folder: Path) -> None:
    """Raise ConfigError if a run folder is a file or a broken link, or cannot be written."""
    if path := next((path for path in (folder, *folder.parents) if os.path.lexists(path) and not path.is_dir()), None):
        what = "a file" if path.exists() else "a broken link"
        raise ConfigError(f"run.dir={folder}", f"{path} is {what}", "Name a folder")
    if not os.access(nearest := existing(folder), os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir={folder}", f"{nearest} cannot be written", "Write another run.dir=FOLDER")


def complain(found: Sequence[Finding]) -> None:
    """Raise ConfigError if there is a problem, else print the warnings, on one rank of each machine."""
    problems = [f"{finding.seen}. {finding.remedy}" for finding in found if finding.severity == "end"]
    if problems:
        raise ConfigError("\n".join(problems))
    for finding in found:
        if finding.severity == "warn" and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"octet: warning: {finding.seen}. {finding.remedy}", file=sys.stderr, flush=True)


def findings(config: Config, found: Found, machine: hardware.Hardware, teacher: Found) -> list[Finding]:
    wanted = needs(config, found, machine, teacher)
    of_cards = [one for gpu in machine.gpus for one in card(config.model.dtype, gpu)]
    here = [*disk(wanted, config.run.dir or RUNS), ram(config, wanted, hardware.free_ram()), *of_cards, *idle(config)]
    return [*here, *bf16_products(config, machine), *adapter(config), *answers(config), *packages(config)]


# ---------------------------------------------------------------- the checks


def disk(wanted: "Needs", folder: Path) -> Iterator[Finding]:
    """Compare free space with the needs of run folder and hub cache, which are added up if they share a disk."""
    run = wanted.run if folder == RUNS else max(0, wanted.run - size_of(folder))  # a resumed run has written some
    demands = [(f"run.dir={folder}", folder, run, "checkpoints and the result")]
    if wanted.download:
        demands.append((f"HF_HUB_CACHE={cache()}", cache(), wanted.download, "the model"))
    devices = [existing(path).stat().st_dev for _, path, _, _ in demands]
    for device in dict.fromkeys(devices):
        keys, folders, sizes, names = zip(*(demand for demand, other in zip(demands, devices) if other == device))
        free, size, settings, what = free_disk(folders[0]), sum(sizes), ", ".join(keys), " and ".join(names)
        if free < size:
            text = f"{settings}: {what} need {amount(size)}, and {amount(free)} are free on that disk"
            key, is_resumed = keys[0].partition("=")[0], (folder / "config.yaml").is_file()
            other = "" if key == "run.dir" and is_resumed else f", or write another {key}=FOLDER"
            yield Finding("end", "disk", text, f"Make room{other}.")
        else:
            yield Finding("note", "disk", f"{amount(free)} free for {settings}; {what} need {amount(size)}")


def ram(config: Config, wanted: "Needs", free: int) -> Finding:
    if free >= wanted.ram:
        return Finding("note", "RAM", f"{amount(free)} free; this run needs {amount(wanted.ram)} or more")
    less = "take a smaller model.name" if config.lora.enabled else "train an adapter: lora.enabled=true"
    text = f"model.name={config.model.name}: it needs {amount(wanted.ram)} of RAM or more, and {amount(free)} are free"
    return Finding("end", "RAM", text, f"End other programs, or {less}.")


def card(dtype: str, gpu: hardware.Gpu) -> Iterator[Finding]:
    """Yield findings about a card: its memory, other programs on it, and whether it supports torch and model.dtype."""
    name, state = f"card {gpu.index}", gpu.state
    if state is None:
        shared = " of RAM, shared with the CPU" if gpu.shares_ram else ""
        yield Finding("note", name, f"{gpu.name}, {gpu.memory_gb:.1f} GB{shared}; how much is free is not known")
        return
    if state.capability < OLDEST_CAPABILITY:
        text = f"{gpu.name} has compute capability {state.capability:g}, and torch has no kernels below 7.5"
        yield Finding("end", name, text, "Take a GTX 16, RTX 20 or newer card, or set CUDA_VISIBLE_DEVICES=''.")
    if dtype == "bf16" and state.capability < BF16_CAPABILITY:
        text = f"model.dtype=bf16: {gpu.name} (compute capability {state.capability:g}) has no bf16"
        yield Finding("end", name, text, "Write model.dtype=auto, or fp16.")
    free = f"{state.free_gb:.1f} of {gpu.memory_gb:.1f} GB free"
    if state.used_gb > BUSY_GB:
        text = f"another program holds {state.used_gb:.1f} GB of {gpu.name} {gpu.index}: {free}"
        yield Finding("warn", name, text, "`nvidia-smi` shows which; the run may not fit beside it.")
    else:
        yield Finding("note", name, f"{gpu.name}, {free}")


def bf16_products(config: Config, machine: hardware.Hardware) -> Iterator[Finding]:
    """Check whether model.quantize=bf16 makes this machine faster. Intel's processors need AMX for it: with AVX512-BF16
    alone, bf16 took 1.3 times as long as fp32."""
    setting = "model.quantize=bf16"
    if config.model.quantize != "bf16":
        return
    cpu = Path("/proc/cpuinfo").read_text()
    if machine.gpus:
        yield Finding("end", "CPU", f"{setting}: it is for CPUs, and there is a card", "Write model.dtype=bf16.")
    elif "amx_bf16" not in cpu and not ("avx512_bf16" in cpu and "AuthenticAMD" in cpu):
        text = f"{setting}: this CPU may multiply bf16 no faster than fp32"
        yield Finding("warn", "CPU", text, "model.quantize=none may be faster.")


def adapter(config: Config) -> Iterator[Finding]:
    """Warn of settings that learned less in trials at the learning rate of the preset."""
    section = "warmup" if config.is_warmup else "algorithm"
    lr = getattr(config, section).lr
    if not config.lora.enabled:
        if lr > WHOLE_LR:
            text = f"{section}.lr={lr:g} is a rate for adapters, and may ruin a whole model (lora.enabled=false)"
            yield Finding("warn", "learning rate", text, "Lower it to a tenth, or take --recipe full_finetune.")
        return
    if config.lora.init != "zero":
        text = f"lora.init={config.lora.init} takes larger steps at the same learning rate, and may ruin the model"
        yield Finding("warn", "adapter", text, f"Lower {section}.lr={lr:g} to a third or less.")


def answers(config: Config) -> Iterator[Finding]:
    """Warn if only answers of a form are paid for which nothing asks, or of several forms in a mixture."""
    is_asking = config.task.name in ("gsm8k", "gsm8k-renumbered", "math", "multiple_choice")  # in its own style alone
    chosen = (config.prompt.style, config.prompt.answer, config.reward.answer)
    if not (config.task.mix or is_asking) or chosen != ("chat", "auto", "strict") or config.warmup.steps:
        return
    task, text = make_task(config.task), "prompt.style=chat asks for no form of answers, and"
    forms = sorted({part.answer_style for part in task.parts}) if config.task.mix else []
    if len(forms) > 1:
        text = f"{text} parts of task.mix have {' and '.join(forms)}"
        yield Finding("warn", "prompt", text, "Leave it out, or name the form that is paid: prompt.answer=FORM.")
    others = config.lora.start or config.prompt.system or config.model.name == "nano"  # which may know the form
    if is_asking and not others:
        text = f"{text} task.name={config.task.name} pays for the form {task.answer_style} alone"
        yield Finding("warn", "prompt", text, "Leave it out, or write reward.answer=lenient.")


def idle(config: Config) -> Iterator[Finding]:
    """Warn of settings that belong to something that is switched off."""
    now, usual = (flat(one.model_dump(mode="json")) for one in (config, Config()))
    is_own = any(".py:" in name for name in (config.task.name, *config.task.mix))  # its function is passed all of task
    for start, has_effect, remedy in SWITCHES:
        changed = [f"{key}={written(now[key])}" for key in now if key.startswith(start) and now[key] != usual[key]]
        if changed and not (is_own and changed[0].startswith("task.")) and not has_effect(config):
            yield Finding("warn", "settings", f"without effect: {', '.join(changed)}", f"{remedy}.")


def packages(config: Config) -> Iterator[Finding]:
    """Check for the packages that only some settings need."""
    wanted = [(name, "bitsandbytes", "pip install bitsandbytes", other) for name, other in needs_bitsandbytes(config)]
    if make.compares_as_mathematics(config.reward, make_task(config.task)):
        setting = "reward.symbolic=true" if config.reward.symbolic else f"task.name={config.task.name}"
        wanted.append((setting, "math-verify", pip_install("math"), "reward.symbolic=false"))
    if config.model.attention == "flash":
        slow = "pip install flash-attn --no-build-isolation, which compiles for a long time"
        wanted.append(("model.attention=flash", "flash-attn", slow, "model.attention=auto"))
    if config.rollout.engine == "vllm_colocate":
        wanted.append(("rollout.engine=vllm_colocate", "vllm", pip_install("vllm"), "rollout.engine=decode"))
    if config.rollout.vllm.start and config.rollout.vllm.python is None:
        other = "rollout.vllm.python=PYTHON, of an environment that has it"
        wanted.append(("rollout.vllm.start=true", "vllm", pip_install("vllm"), other))
    for setting, package, installs, other in wanted:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            remedy = f"Run: {installs}, or write {other}."
            yield Finding("end", package, f"{setting}: it needs {package}, which is not installed", remedy)
        else:
            yield Finding("note", package, f"installed, for {setting}")


def import_libraries(config: Config) -> None:
    """Import transformers and PEFT, quietly, and without bitsandbytes unless a setting needs it: that takes two seconds
    to import. Python imports no module whose entry in sys.modules is None."""
    quiet.quiet()
    if not any(needs_bitsandbytes(config)):
        sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    gc.disable()  # the imports create a million objects and no garbage; collecting takes another second
    fast_imports.import_libraries()
    gc.freeze()  # torch collects garbage before each CUDA graph, which need not examine these objects
    gc.enable()
    builder = getattr(getattr(sys.modules.get("triton._C.libtriton"), "ir", None), "builder", None)
    if type(builder).__module__ == "nanobind":  # since triton 3.9, that of torch 2.15
        atexit.register(gc.unfreeze)  # it prints 50 lines about its objects if they are never collected


def needs_bitsandbytes(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each setting that needs bitsandbytes, and one that does without."""
    if config.optim.name == "adamw_8bit":
        yield "optim.name=adamw_8bit", "optim.name=adamw"
    if config.model.quantize in ("nf4", "int8"):
        yield f"model.quantize={config.model.quantize}", "model.quantize=none"
    if config.teacher.quantize in ("nf4", "int8"):
        yield f"teacher.quantize={config.teacher.quantize}", "teacher.quantize=none"


# ---------------------------------------------------------------- the minimum that a run needs


class Needs(NamedTuple):
    """The bytes without which a run must fail."""

    download: int  # in the cache of the hub
    run: int  # in the run folder: checkpoints and the result
    ram: int


def needs(config: Config, found: Found, machine: hardware.Hardware, teacher: Found = NOTHING) -> Needs:
    """Return the minimum that all ranks on this machine need, where `machine` has the cards of the policy."""
    is_adapter, dtype = config.lora.enabled, config.model.dtype
    numbers = _numbers(found)
    width = 4 if dtype == "fp32" or (dtype == "auto" and not machine.gpus) else 2
    # layers that bitsandbytes quantises reach a card one by one
    widths = {"none": width, "bf16": width, "int8": 0 if machine.gpus else 1, "nf4": 0 if machine.gpus else 1 / 2}
    loaded = [numbers * widths[config.model.quantize], _numbers(teacher) * widths[config.teacher.quantize]]
    trained = numbers
    if is_adapter:
        shape = planned_shape(config.model)
        trained = Planner(shape, config, world_size=1, vram=0).trained if shape else 0
    state = int(trained * (4 + MOMENTS[config.optim.name]))  # in fp32 and its moments, in a checkpoint or offloaded
    checkpoint = state + trained * width * (2 if is_adapter else 1)  # an adapter is also saved in PEFT's format
    is_offloaded = ds_config.is_offloaded(ds_config.zero_settings(config.engine), "optimizer")
    results = config.merges or not is_adapter
    ranks, local = hardware.ranks(machine)
    return Needs(
        download=found.download + (teacher.download if config.teacher.name != config.model.name else 0),
        run=(config.run.keep + 1) * checkpoint + numbers * width * results,
        # with a card, the first model has left the RAM before the second one is loaded
        ram=local * (PROCESS_BYTES + int(max(loaded) if machine.gpus else sum(loaded)))
        + state * is_offloaded * local // ranks,  # each rank has its part
    )


def _numbers(found: Found) -> int:
    """Return the parameters of a model from the size of its files and the dtype in its config.json, if that exists."""
    stored = json.loads((found.folder / "config.json").read_text()) if found.folder else {}
    # models without a type, which may stand in the text model, are in fp32; those not here yet are mostly in 16 bits
    parts = [stored, text if isinstance(text := stored.get("text_config"), dict) else {}]
    types = [part.get(key) for part in parts for key in ("dtype", "torch_dtype")]
    named = next(filter(None, types), "float32" if found.folder else "bfloat16")
    return found.weights // (4 if named == "float32" else 2)


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    folder = folder.expanduser().absolute()
    return folder if folder.is_dir() else existing(folder.parent)
