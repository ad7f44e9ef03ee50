"""`octet eval`: its options, and the settings of an evaluation, which `octet merge` and `octet export` share.

Nothing here imports torch, so mistakes are reported at once.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.commands.shared_options import (
    TASKS,
    add_overrides,
    latest,
    must_be_writable,
    options_of,
    pop_folder,
    positive,
)
from trainer.config.resolve import overrides_of, resolve
from trainer.config.settings import RUNS, Config, Model
from trainer.errors import CheckpointError, ConfigError
from trainer.machine import quiet
from trainer.machine.safe_text import print, visible
from trainer.plan import downloads, preflight
from trainer.plan.read_data import read_held_out
from trainer.records import Draws
from trainer.run_folder.model_source import Source

if TYPE_CHECKING:
    from trainer.run.evaluate_models import Answer
    from trainer.run.job import Evaluations, Result

SAMPLE_TEMPERATURE = 0.7
# The servers of a run may no longer exist. Others can be named on the command line.
NO_SERVERS = ("rollout.engine=auto", "rollout.ahead=0", "rollout.vllm.urls=[]", "rollout.vllm.start=false")


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet eval runs/demo --problems 1000 --samples 8. A run stands for its adapter or model."
    add_model_arguments(parser)
    parser.add_argument("--adapter", type=Path, help="the adapter folder of a run; its base is evaluated beside it")
    parser.add_argument("--merged", type=Path, help="the merged folder of a run; its base is evaluated beside it")
    parser.add_argument("--problems", type=int, help="how many held-out problems")
    parser.add_argument("--samples", type=positive, metavar="K", help="also sample K answers: avg@K, maj@K, pass@K")
    parser.add_argument("--temperature", type=float, help=f"temperature of samples (default {SAMPLE_TEMPERATURE})")
    parser.add_argument("--trials", type=positive, metavar="T", help="draw all samples T times: mean and deviation")
    parser.add_argument("--out", type=Path, help="the folder for eval.json, eval.md and the answers")


def add_model_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", help="a hub id, a folder, or nano; by default the latest run, else nano")
    parser.add_argument("--task", help=TASKS)
    parser.add_argument("--preset", help="take the other settings from this preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_overrides(parser)


def run(options: Namespace) -> None:
    config, (facts, evaluations) = asked(options)
    from trainer.run import evaluate_models

    if facts:
        evaluate_models.answer(facts, evaluations, options.json)
        evaluate_models.must_be_rounding(config, evaluations)


def evaluate(
    run: "Result | Path | str",
    problems: int | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    out: Path | str | None = None,
    settings: Sequence[str] = (),
    quiet: bool = False,
) -> "Evaluations":
    """Evaluate the model of a run beside its base, as `octet eval` does, and return both evaluations by name.

    Args:
        run: The result of `train`, a run folder, or an adapter or a model in it.
        problems: How many held-out problems; by default as in the run.
        samples: How many sampled answers to each problem, beside the greedy one.
        temperature: The temperature of the sampled answers.
        out: The folder for `eval.json`, `eval.md` and the answers; by default in the run folder.
        settings: Further settings, such as `["task.test_path=FILE"]`.
        quiet: Do not show progress and warnings.
    """
    place, samples = str(getattr(run, "folder", run)), None if samples is None else max(1, samples)
    chosen: dict[str, Any] = {"problems": problems, "samples": samples, "temperature": temperature}
    chosen |= {"out": Path(out).expanduser() if out else None, "overrides": [place, *settings]}
    from trainer.run import python_api

    with python_api.as_it_was("auto", quiet):
        _, (_, evaluations) = asked(options_of("eval", **chosen))
    return {one.name: one for one in evaluations}


def asked(options: Namespace) -> "tuple[Config, Answer]":
    """Evaluate what the options of the command ask for. Ranks other than 0 return no facts."""
    source = _source(options)
    config = settings_for(options, source)
    data = read_held_out(config)
    typed, path = [text.partition("=")[0] for text in options.overrides], config.task.path or ""
    if "task.path" in typed and "task.test_path" not in typed and os.path.isfile(os.path.expanduser(path)):
        place = config.task.test_path or f"a part of {path}"
        print(f"octet: the questions are those of {place}; task.test_path={path} asks all of {path}", file=sys.stderr)
    draws, model = _draws(options, config), (source and source.folder) or Path(config.model.name)
    out = options.out or (source.run / "eval" if source and source.run else Path(f"eval-{model.resolve().name}"))
    if out.exists() and (not out.is_dir() or (out.is_symlink() and not options.out)):  # somebody else may have made it
        raise ConfigError(f"--out {out}", "it is a link" if out.is_dir() else "it is a file", "Name a folder")
    must_be_writable(out)
    preflight.import_libraries(config)
    from trainer.run import evaluate_models
    from trainer.run_folder import provenance

    if source and source.run:
        seen, asked = provenance.shared(source.run, data.held_out), len(data.held_out)
        if seen > 1:  # one may have the checksum of another problem
            print(f"octet: warning: {seen} of {asked} problems are training problems of {source.run}", file=sys.stderr)
        if source.adapter and (start := config.lora.start):
            print(f"octet: base is {config.model.name} without {start}, with which this run began", file=sys.stderr)
    named = {"adapter": source.adapter if source else None, "merged": options.merged}
    models = {name: path for name, path in named.items() if path}
    return config, evaluate_models.evaluate(config, data, models, draws, out)


def _source(options: Namespace) -> Source | None:
    """Return the source that the options name: an adapter, a merged model, a run folder, or a model."""
    if options.merged and not (options.merged / "config.json").is_file():
        reason = "there is no config.json in it"
        raise CheckpointError(f"--merged {options.merged}", reason, "Name a folder with a model")
    if options.adapter:
        return adapter_of(options)
    first = next(iter(options.overrides), "=")
    names_something = options.merged or options.preset or options.task or names_a_model(options)
    if options.model and os.path.isfile(f"{first}/config.yaml"):
        reason = f"the run {first} names a model as well"
        raise ConfigError(f"--model {options.model}", reason, "Leave one of the two out")
    folder = None if options.model else pop_folder(options.overrides)
    if not folder and (names_something or not any(RUNS.glob("*/config.yaml"))):
        named = options.merged or Path(options.model or "nano")
        return Source(named) if named.is_dir() else None
    folder = folder or latest()
    source = Source.of(folder)
    if source.folder is None:
        raise CheckpointError(folder, "there is no such folder", "Name that of a run, an adapter or a model")
    options.model = None if source.adapter else str(source.folder)
    return source


def adapter_of(options: Namespace) -> Source:
    if not (options.adapter / "adapter_config.json").is_file():
        remedy = "Name the `adapter` folder of a run" + ", or a whole model with --model" * ("merged" in options)
        reason = f"there is no {'adapter_config.json in it' if options.adapter.exists() else 'such folder'}"
        raise CheckpointError(options.adapter, reason, remedy)
    return Source(options.adapter, is_adapter=True)


def settings_for(options: Namespace, source: Source | None) -> Config:
    """Return the settings of the run that made the adapter or model, if there is one, changed by the command line."""
    # an adapter fits the original base, even if it was trained over a quantised one
    clean = ["model.quantize=none", "model.quantize_head=none"]
    preset, base = options.preset or (str(source.run / "config.yaml") if source and source.run else None), options.model
    revision = None
    if preset is None:
        if source and source.adapter and base is None:
            base, revision = source.base, None if names_a_model(options) else source.revision
        elif source and base is None:
            raise ConfigError(f"--merged {source.folder}", "it has no run's config.yaml beside it", "Name its --model")
        if source and base == "" and not names_a_model(options):
            reason = "it does not say what it was trained over"
            raise CheckpointError(f"--adapter {source.folder}", reason, "Name that with --model")
        preset = "nano" if base in (None, "nano") else None
    named = {"model.name": base or None, "model.revision": revision}
    named |= {"task.name": options.task, "eval.problems": options.problems}
    local = NO_SERVERS if preset and resolve(preset).rollout.uses_vllm else ()
    config = resolve(preset, None, [*clean, *local, *overrides_of(named), *options.overrides])
    if not config.eval.problems and not getattr(options, "no_check", False):  # of octet export
        or_not = ", or --no-check" if "no_check" in options else ""
        raise ConfigError("eval.problems=0", "there is nothing to evaluate", f"Write --problems 1 or more{or_not}")
    downloads.check(config, needs_data=not getattr(options, "no_check", False))
    # with neither option, the base is that of the run
    if source and source.adapter and (options.preset or names_a_model(options)):
        _refuse_another_base(source, config.model, names_a_model(options))
    elif source and not names_a_model(options):
        source.must_have_its_base(config.model)
    quiet.quiet()
    return config


def _refuse_another_base(source: Source, model: Model, is_named: bool) -> None:
    """Raise CheckpointError if the adapter was trained over another model. If that is unknown, accept a model that the
    command line names, with a warning."""
    base, is_base = visible(source.base), source.is_over(model)
    if is_base is None and is_named:
        known = f"it was trained over {base}" if base else "it does not say what it was trained over"
        warning = f"--adapter {source.folder}: {known}; is model.name={model.name} the same?"
        print(f"octet: warning: {warning}", file=sys.stderr)
    elif not is_base:
        reason = f"it was trained over {base or 'a model without a name'}, not over model.name={model.name}"
        remedy = f"Write --model {base or 'and its base'}, or correct the name of its base in its adapter_config.json"
        raise CheckpointError(f"--adapter {source.folder}", reason, remedy)


def names_a_model(options: Namespace) -> bool:
    return options.model is not None or any(text.startswith("model.name=") for text in options.overrides)


def _draws(options: Namespace, config: Config) -> Draws | None:
    """Return how to sample, or None if nothing on the command line asks for samples."""
    samples = options.samples
    if samples is None and any(text.startswith("eval.samples=") for text in options.overrides):
        samples = config.eval.samples or None
    if samples is options.trials is options.temperature is None:
        return None
    temperature = SAMPLE_TEMPERATURE if options.temperature is None else options.temperature
    if not 0 < temperature < inf:
        reason = "samples need one above 0"
        raise ConfigError(f"--temperature {temperature:g}", reason, "Greedy answers are always there: leave it out")
    return Draws(samples or 1, temperature, options.trials or 1, config.run.seed)
