"""`octet eval`: its options, and the settings under which a model is evaluated. `octet merge` evaluates with them, too.

Nothing here imports torch, so a mistake is answered at once.
"""

from __future__ import annotations

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from math import inf
from pathlib import Path
from typing import Any

from trainer.commands.options import TASKS, add_overrides
from trainer.config.command_line import overrides_of, resolve
from trainer.config.settings import Config, Model
from trainer.errors import CheckpointError, ConfigError
from trainer.machine import quiet
from trainer.machine.visible import print, visible
from trainer.model import hub
from trainer.plan import downloads, preflight
from trainer.plan.data import read_held_out
from trainer.records import Draws
from trainer.run_folder.reader import read_run

SAMPLE_TEMPERATURE = 0.7
LONGEST_NAME = 500  # characters of the name of a model
# The servers of a run belong to that run: they may be gone. Other servers can be named on the command line.
NO_SERVERS = ("rollout.engine=auto", "rollout.ahead=0", "rollout.vllm.urls=[]", "rollout.vllm.start=false")


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = (
        "example: octet eval runs/demo --problems 1000 --samples 8. A run folder stands for its adapter or model."
    )
    add_model_arguments(parser)
    parser.add_argument("--adapter", type=Path, help="the adapter folder of a run; its base is evaluated beside it")
    parser.add_argument("--merged", type=Path, help="the merged folder of a run; its base is evaluated beside it")
    parser.add_argument("--problems", type=int, help="how many held-out problems")
    parser.add_argument("--samples", type=int, metavar="K", help="sampled answers too: avg@K, maj@K and pass@K")
    parser.add_argument("--temperature", type=float, help=f"of the sampled answers (default {SAMPLE_TEMPERATURE})")
    parser.add_argument("--trials", type=int, metavar="T", help="sample everything T times: mean and deviation")
    parser.add_argument("--out", type=Path, help="the folder for eval.json, eval.md and the answers")


def add_model_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", help="a hub id, a folder, or nano; by default the base of --adapter, else nano")
    parser.add_argument("--task", help=TASKS)
    parser.add_argument("--preset", help="take the other settings from this preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_overrides(parser)


def run(options: Namespace) -> None:
    _take_from_run(options)
    if options.merged and not (options.merged / "config.json").is_file():
        raise CheckpointError(
            f"--merged {options.merged}", "there is no config.json in it", "Name a folder with a model"
        )
    config = settings_for(options)
    data = read_held_out(config)
    draws, out = _draws(options, config.run.seed), options.out or _default_out(options, config)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}", "it is a file", "Name a folder")
    from trainer.run import evaluate_models

    models = evaluate_models.Models(options.adapter, options.merged)
    evaluate_models.evaluate(config, data, models, draws, out, as_json=options.json)


def _take_from_run(options: Namespace) -> None:
    """Evaluate the adapter of a run folder that stands before the settings, or its whole model."""
    folder = Path(next(iter(options.overrides), ""))
    if options.adapter or options.model or "=" in folder.name or not (folder / "config.yaml").is_file():
        return
    del options.overrides[0]
    if (folder / "adapter").is_dir():
        options.adapter = folder / "adapter"
    elif (folder / "model").is_dir():
        options.model = str(folder / "model")
    else:
        raise CheckpointError(folder, "it has no adapter and no model yet", "Wait for the end of the run")


def settings_for(options: Namespace) -> Config:
    """Return the settings of the run that made the adapter or model, if there is one, changed by the command line."""
    if options.adapter and not (options.adapter / "adapter_config.json").is_file():
        raise CheckpointError(
            f"--adapter {options.adapter}",
            "there is no adapter_config.json in it",
            "Name the `adapter` folder of a run, or a whole model with --model",
        )
    clean = [
        "model.quantize=none",
        "model.quantize_head=none",
    ]  # whatever the run had: an adapter fits the original base
    preset = options.preset or _preset_for(options)
    of_another_trainer = options.adapter and preset is None and not names_a_model(options)  # and no run beside it
    model = _base_of(options.adapter) if of_another_trainer else options.model
    named = {"model.name": model, "task.name": options.task, "eval.problems": options.problems}
    local = NO_SERVERS if preset and resolve(preset).rollout.uses_servers else ()
    config = resolve(preset, None, [*clean, *local, *overrides_of(named), *options.overrides])
    is_unchecked = getattr(options, "no_check", False)  # of octet export
    if not config.eval.problems and not is_unchecked:
        or_not = ", or --no-check" if "no_check" in options else ""
        raise ConfigError("eval.problems=0", "there is nothing to evaluate", f"Write --problems 1 or more{or_not}")
    downloads.check(config)
    _refuse_another_base(options, config)
    quiet.quiet()
    preflight.skip_unused_imports(config)
    return config


def _refuse_another_base(options: Namespace, config: Config) -> None:
    """Raise CheckpointError for an adapter that was trained over another model than the one to be evaluated. A model
    that the command line names is believed, with a warning, where that cannot be known."""
    is_named = names_a_model(options)
    if not options.adapter or (options.preset is None and not is_named):  # then it is that of the adapter's run
        return
    base, model = visible(_base_of(options.adapter)), config.model.name
    is_base = _is_base(base, config.model)
    if is_base is None and is_named:
        known = f"it was trained over {base}" if base else "it does not say what it was trained over"
        print(f"octet: warning: --adapter {options.adapter}: {known}; is model.name={model} the same?", file=sys.stderr)
    elif not is_base:
        raise CheckpointError(
            f"--adapter {options.adapter}",
            f"it was trained over {base or 'a model without a name'}, not over model.name={model}",
            f"Write --model {base or 'and its base'}, or leave --preset out",
        )


def _is_base(base: str, model: Model) -> bool | None:
    """Return True if an adapter over `base` is one over this model, and None if that cannot be known."""
    if base == model.name:
        return True
    weights = base and hub.fingerprint(Model(name=base)), hub.fingerprint(model)
    if all(weights):
        return weights[0] == weights[1]
    wanted, folder = _on_the_hub(base), hub.local_folder(model.name)
    if folder and wanted == folder.resolve().name.lower():
        return True
    stored = hub.read_json(f"model.name={model.name}", folder / "config.json") if folder else {}
    found = _on_the_hub(str(stored.get("_name_or_path")) if folder else model.name)
    return wanted == found if wanted and found else None


def names_a_model(options: Namespace) -> bool:
    return options.model is not None or any(text.startswith("model.name=") for text in options.overrides)


def _base_of(adapter: Path) -> str:
    """Return the name of the model that an adapter was trained over, or "" if it does not say."""
    path = adapter / "adapter_config.json"
    try:
        named = json.loads(path.read_text())["base_model_name_or_path"]
        base = Path("" if named is None else named)
        if len(str(base)) > LONGEST_NAME:
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(
            path, f"it does not say what the adapter was trained over ({type(error).__name__})", "Restore the file"
        ) from None
    if base.parts[:1] == ("unsloth",):  # it names its 4-bit copy, which is beside the model of 16 bits
        return str(base).removesuffix("-bnb-4bit").removesuffix("-unsloth")
    return "nano" if base.parts[-3:] == ("trainer", "model", "nano") else str(base) if base.parts else ""


def _on_the_hub(model: str) -> str:
    """Return the name of a model on the hub without its owner, or "" for a folder. The embedded model has its own."""
    if model == "nano":
        return model
    return "" if Path(model).exists() or model.count("/") != 1 else model.partition("/")[2].lower()


def _draws(options: Namespace, seed: int) -> Draws | None:
    """Return how to sample, or None if neither samples, trials nor a temperature were asked for."""
    if options.samples is options.trials is options.temperature is None:
        return None
    for name in ("samples", "trials"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}", "it must be at least 1", "Leave it out for greedy answers only")
    temperature = SAMPLE_TEMPERATURE if options.temperature is None else options.temperature
    if not 0 < temperature < inf:
        raise ConfigError(
            f"--temperature {temperature:g}",
            "samples need one above 0",
            "Greedy answers are always there: leave it out",
        )
    return Draws(options.samples or 1, temperature, options.trials or 1, seed)


def _default_out(options: Namespace, config: Config) -> Path:
    """Return `eval` in the run folder of the adapter or model, or `eval-<name>` here if there is no run folder."""
    folder = _evaluated(options)
    if folder and (stored := _config_of_run(folder)):
        return stored.parent / "eval"
    return Path(f"eval-{(folder or Path(config.model.name)).resolve().name}")


def _preset_for(options: Namespace) -> str | None:
    folder = _evaluated(options)
    if folder and (stored := _config_of_run(folder)):
        return str(stored)
    if folder and not options.model and not options.adapter:
        raise ConfigError(f"--merged {folder}", "it has no run's config.yaml beside it", "Name its base: --model")
    base = _base_of(options.adapter) if options.adapter and not options.model else options.model
    if base == "" and not names_a_model(options):
        raise CheckpointError(
            f"--adapter {folder}", "it does not say what it was trained over", "Name that with --model"
        )
    return "nano" if base in (None, "nano") else None


def _evaluated(options: Namespace) -> Path | None:
    """Return the adapter, the merged model or the model that was named; `octet merge` has no --merged."""
    return options.adapter or getattr(options, "merged", None) or (Path(options.model) if options.model else None)


def _config_of_run(folder: Path) -> Path | None:
    """Return the config.yaml of the run that this folder, which may be the adapter of a checkpoint, belongs to."""
    place = folder.resolve()
    run = place.parents[2] if place.parent.parent.name == "checkpoints" else folder.parent
    return run / "config.yaml" if place.is_dir() and (run / "config.yaml").is_file() else None


def origin(folder: Path, out: Path) -> dict[str, Any]:
    """Return what an export records of the model that it was made of."""
    settings = _config_of_run(folder)
    step = read_run(settings.parent).step_of(folder) if settings else None
    name = (settings.parent if settings else folder).resolve().name
    return {"name": name, "source": os.path.relpath(folder.resolve(), out.resolve()), "step": step}
