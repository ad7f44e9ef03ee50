"""The command `octet`, and how every command ends.

octet doctor what this machine has for a run, and what it lacks
octet fetch  model, data and packages for a machine without internet
octet eval   how good a model is, with or without an adapter
octet merge  the adapter of a run, merged into its base
octet task   the problems of a task, and what a model sees of them
octet score  the rewards of completions from a file
octet play   write an answer yourself and see its rewards
octet plan   what fits the memory of a card, before anything is loaded
octet slurm  a run as a job of a Slurm cluster
octet compare  the runs of a sweep side by side
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from trainer.checks import downloads
from trainer.config.command_line import choose_preset, resolve
from trainer.config.settings import Config
from trainer.errors import CheckpointError, ConfigError
from trainer.exits import answering_errors, leave
from trainer.machine import hardware, quiet
from trainer.ranks import slurm
from trainer.records import Draws

SAMPLE_TEMPERATURE = 0.7
# The servers of a run are its own: they may be gone, and whoever asks about its adapter can name others.
SERVED_NO_MORE = ("rollout.engine=auto", "rollout.ahead=0", "rollout.vllm.urls=[]", "rollout.vllm.start=false")


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    hardware.let_memory_grow()
    parsers = {"eval": _eval_parser, "merge": _merge_parser, "task": _task_parser}
    parsers |= {"score": _score_parser, "play": _play_parser, "doctor": _doctor_parser, "fetch": _fetch_parser}
    parsers["plan"] = _plan_parser
    parsers |= {"slurm": _slurm_parser, "compare": _compare_parser}
    if not arguments or arguments[0] not in parsers:
        print(f"{(__doc__ or '').strip()}\n\nEach has --help. Training is ./run_deepspeed.sh.")
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    options = parsers[arguments[0]]().parse_intermixed_args(arguments[1:])
    slurm.adopt_ranks()
    try:
        status = answering_errors(lambda: options.command(options), options.debug)
        sys.stdout.flush()
    except BrokenPipeError:  # `octet plan | head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    leave(status)


def _eval_parser() -> argparse.ArgumentParser:
    parser = _parser("eval", "Accuracy on held-out problems, greedy and sampled, with 95 % intervals.", _eval)
    parser.add_argument("--adapter", type=Path, help="the adapter folder of a run; its base is evaluated beside it")
    parser.add_argument("--merged", type=Path, help="the merged folder of a run, to be evaluated beside its base")
    parser.add_argument("--problems", type=int, help="how many held-out problems")
    parser.add_argument("--samples", type=int, metavar="K", help="sampled answers too: avg@K, maj@K and pass@K")
    parser.add_argument("--temperature", type=float, help=f"of the sampled answers (default {SAMPLE_TEMPERATURE})")
    parser.add_argument("--trials", type=int, metavar="T", help="sample all of it T times: mean and standard deviation")
    parser.add_argument("--out", type=Path, help="where eval.json, eval.md and the answers go; see docs/evaluation.md")
    return parser


def _merge_parser() -> argparse.ArgumentParser:
    parser = _parser("merge", "Write the model with an adapter merged in, and compare the two.", _merge)
    parser.add_argument("--adapter", type=Path, required=True, help="the adapter folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems for the comparison (default 32)")
    return parser


def _task_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octet task", description="Print the exact text and token count that a model sees.", allow_abbrev=False
    )
    parser.set_defaults(command=_task)
    parser.add_argument("action", choices=["show"])
    parser.add_argument("task", help="nano, gsm8k, math, multiple_choice or records")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as task.path=my.jsonl")
    parser.add_argument("-n", type=int, default=3, help="how many problems to print (default 3)")
    parser.add_argument("--split", choices=["train", "test"], default="train", help="which problems (default train)")
    parser.add_argument("--model", default="nano", help="whose tokenizer: a hub id, a folder, or nano (default)")
    parser.add_argument("--preset", help="take the other settings from this preset")
    parser.add_argument("--style", help="the same as prompt.style=STYLE")
    parser.add_argument("--data-dir", help="the same as task.data_dir=FOLDER")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _score_parser() -> argparse.ArgumentParser:
    parser = _light_parser("score", "Score the completions of a JSON lines file; see docs/rewards.md.", _score)
    parser.add_argument("file", help="each line has `completion` and `answer`; - is standard input")
    return _with_overrides(parser)


def _play_parser() -> argparse.ArgumentParser:
    parser = _light_parser("play", "Answer problems yourself and see what each reward makes of it.", _play)
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")
    return _with_overrides(parser)


def _doctor_parser() -> argparse.ArgumentParser:
    parser = _run_parser(
        "doctor", "Look at this machine: can a run of these settings start, and get to its end?", _doctor
    )
    parser.epilog = "Exit status: 0 when it can, 1 when something stands in its way, 2 for a mistake in the settings."
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _fetch_parser() -> argparse.ArgumentParser:
    parser = _run_parser("fetch", "Bring model, data and packages of a run to a machine without internet.", _fetch)
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder to fill, or to go on filling")
    parser.add_argument("--no-wheels", action="store_true", help="leave the packages out")
    parser.add_argument(
        "--verify", type=Path, metavar="DIR", help="compare a copied folder with its manifest, and stop"
    )
    return parser


def _run_parser(name: str, description: str, command: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    """For commands about a run that has not begun."""
    parser = argparse.ArgumentParser(prog=f"octet {name}", description=description, allow_abbrev=False)
    parser.set_defaults(command=command)
    parser.add_argument("--preset", help="by default the one that the hardware chooses")
    parser.add_argument("--recipe", help="an objective on top")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return _with_overrides(parser)


def _slurm_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octet slurm", description="Submit a run to a Slurm cluster; see docs/slurm.md.", allow_abbrev=False
    )
    parser.set_defaults(command=_slurm)
    parser.add_argument("--preset", default="cluster", help="by default cluster")
    parser.add_argument("--recipe", help="an objective on top")
    parser.add_argument("--nodes", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--gpus", type=int, default=1, help="of each node (default 1): a rank each")
    parser.add_argument("--time", help="limit, as sbatch reads it; by default that of slurm/site.env")
    parser.add_argument("--sweep", type=Path, metavar="GRID", help="a run for each line of this file")
    parser.add_argument("--chain", type=int, default=1, metavar="N", help="N jobs that go on one after the other")
    parser.add_argument("--dry-run", action="store_true", help="write script and configuration, and submit nothing")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return _with_overrides(parser)


def _plan_parser() -> argparse.ArgumentParser:
    parser = _run_parser("plan", "The memory that a run needs, phase by phase; see docs/memory.md.", _plan)
    parser.add_argument("--model", help="a hub id, a folder, or nano; by default that of the preset")
    parser.add_argument("--vram", type=float, metavar="GB", help="of the card; by default that of this machine, else 8")
    parser.add_argument("--gpus", type=int, metavar="N", help="cards that share the work; by default those here")
    parser.add_argument("--group", type=int, metavar="G", help="the same as rollout.group_size=G")
    parser.add_argument("--completion", type=int, metavar="N", help="the same as rollout.max_new_tokens=N")
    parser.add_argument("--prompt", type=int, metavar="N", help="the same as prompt.max_tokens=N")
    parser.add_argument("--search", action="store_true", help="propose settings that fit, and use the card")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="octet compare",
        description="Runs side by side: where they differ, and what came of it.",
        allow_abbrev=False,
    )
    parser.set_defaults(command=_compare)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _light_parser(
    name: str, description: str, command: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    """For commands that need no model."""
    parser = argparse.ArgumentParser(prog=f"octet {name}", description=description, allow_abbrev=False)
    parser.set_defaults(command=command, data_dir=None)
    parser.add_argument("--task", help="nano (default), gsm8k, math, multiple_choice or records")
    parser.add_argument("--preset", help="take the other settings from this preset, or from the config.yaml of a run")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _with_overrides(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, such as reward.custom=mine.py:score"
    )
    return parser


def _parser(name: str, description: str, command: Callable[[argparse.Namespace], None]) -> argparse.ArgumentParser:
    """What all commands take."""
    parser = argparse.ArgumentParser(prog=f"octet {name}", description=description, allow_abbrev=False)
    parser.set_defaults(command=command)
    parser.add_argument("--model", help="a hub id, a folder, or nano; by default the base of --adapter, else nano")
    parser.add_argument("--task", help="nano, gsm8k, math, multiple_choice or records")
    parser.add_argument("--preset", help="take the other settings from this preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as task.data_dir=FOLDER")
    return parser


def _eval(options: argparse.Namespace) -> None:
    if options.merged and not (options.merged / "config.json").is_file():
        raise CheckpointError(f"--merged {options.merged}: there is no config.json in it. Name a folder with a model.")
    config = _settings(options)
    draws, out = _draws(options, config.run.seed), options.out or _default_out(options, config)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: it is a file. Name a folder.")
    from trainer.commands import evaluate

    evaluate.evaluate(config, evaluate.Models(options.adapter, options.merged), draws, out, as_json=options.json)


def _draws(options: argparse.Namespace, seed: int) -> Draws | None:
    """How to sample; None when neither samples nor trials nor a temperature was asked for."""
    if options.samples is options.trials is options.temperature is None:
        return None
    for name in ("samples", "trials"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: it must be at least 1. Leave it out for greedy answers only.")
    temperature = SAMPLE_TEMPERATURE if options.temperature is None else options.temperature
    if not 0 < temperature < inf:
        raise ConfigError(
            f"--temperature {temperature:g}: samples need one above 0. Greedy answers are always there: leave it out."
        )
    return Draws(options.samples or 1, temperature, options.trials or 1, seed)


def _default_out(options: argparse.Namespace, config: Config) -> Path:
    """A folder in the run that is asked about, beside the evaluation that it made itself; else `eval-<name>` here."""
    named = _named(options)
    if named and _run_of(named):
        return named.parent / "eval"
    return Path(f"eval-{(named or Path(config.model.name)).resolve().name}")


def _merge(options: argparse.Namespace) -> None:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError(f"--out {options.out}: it exists and is not empty. Name a new folder.")
    config = _settings(options)
    from trainer.commands import evaluate

    evaluate.merge(config, options.adapter, options.out, as_json=options.json)


def _task(options: argparse.Namespace) -> None:
    named = {"model.name": options.model, "task.name": options.task}
    named |= {"prompt.style": options.style, "task.data_dir": options.data_dir}
    overrides = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    config = resolve(options.preset, None, [*overrides, *options.overrides])
    downloads.check(config)
    from trainer.commands import task

    task.show(config, options.split, options.n, as_json=options.json)


def _score(options: argparse.Namespace) -> None:
    if options.task == "records":  # these completions are the records
        options.overrides.insert(0, f"task.path={options.file}")
    config = _light_settings(options)
    from trainer.commands import score

    score.score_file(config, options.file)


def _play(options: argparse.Namespace) -> None:
    config = _light_settings(options)
    downloads.check(config)
    from trainer.commands import play

    play.play(config)


def _doctor(options: argparse.Namespace) -> None:
    preset, why = (options.preset, "") if options.preset else choose_preset(hardware.detect())
    config = resolve(preset, options.recipe, options.overrides)
    from trainer.commands import doctor

    title = " ".join([f"preset {preset}", *([options.recipe] if options.recipe else []), *options.overrides])
    if doctor.examine(config, f"{title} ({why})" if why else title, options.json):
        sys.exit(1)


def _fetch(options: argparse.Namespace) -> None:
    from trainer.commands import fetch

    if options.verify:
        fetch.verify(options.verify)
        return
    if options.to is None:
        raise ConfigError("--to: it names the folder to fill. Write --to DIR.")
    preset = options.preset or choose_preset(hardware.detect())[0]
    config = resolve(preset, options.recipe, options.overrides)
    chosen = ["--preset", preset, *(["--recipe", options.recipe] if options.recipe else []), *options.overrides]
    fetch.fetch(config, chosen, options.to, wheels=not options.no_wheels)


def _plan(options: argparse.Namespace) -> None:
    from trainer.commands import plan

    if not plan.show(options):
        sys.exit(1)


def _slurm(options: argparse.Namespace) -> None:
    config = resolve(options.preset, options.recipe, options.overrides)
    from trainer.commands import slurm

    job = slurm.JobRequest(options.nodes, options.gpus, options.time, options.sweep, options.chain)
    slurm.slurm(config, options.preset, job, options.dry_run)


def _compare(options: argparse.Namespace) -> None:
    from trainer.commands import compare

    compare.compare(options.runs, options.json)


def _light_settings(options: argparse.Namespace) -> Config:
    """No model is loaded, so its name is that of the one that is always there."""
    named = {"task.name": options.task, "task.data_dir": options.data_dir, "model.name": "nano"}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None]
    return resolve(options.preset, None, [*overrides, *options.overrides])


def _settings(options: argparse.Namespace) -> Config:
    """The settings of the run that made the adapter, if there is one, then what the command line says."""
    named = {"model.name": options.model, "task.name": options.task, "eval.problems": options.problems}
    overrides = [f"{key}={value}" for key, value in named.items() if value is not None]
    if options.adapter and not (options.adapter / "adapter_config.json").is_file():
        raise CheckpointError(
            f"--adapter {options.adapter}: there is no adapter_config.json in it. Name the `adapter` folder of a run, "
            "or a whole model with --model."
        )
    clean = "model.quantize=none"  # whatever the run had: an adapter fits the original base
    preset = options.preset or _preset_for(options)
    own = SERVED_NO_MORE if preset and resolve(preset).rollout.asks_servers else ()
    config = resolve(preset, None, [clean, *own, *overrides, *options.overrides])
    if not config.eval.problems:
        raise ConfigError("eval.problems=0: there is nothing to evaluate. Try --problems 256.")
    downloads.check(config)
    quiet.quiet()
    return config


def _preset_for(options: argparse.Namespace) -> str | None:
    named = _named(options)
    if named and (run := _run_of(named)):
        return str(run)
    if named and not options.model:
        flag = "--adapter" if options.adapter else "--merged"
        raise ConfigError(f"{flag} {named}: it has no run's config.yaml beside it. Name its base: --model.")
    return "nano" if options.model in (None, "nano") else None


def _named(options: argparse.Namespace) -> Path | None:
    """What the question is about: an adapter, a merged model, or a model."""
    return options.adapter or getattr(options, "merged", None) or (Path(options.model) if options.model else None)


def _run_of(folder: Path) -> Path | None:
    """The settings of the run that has this folder in it."""
    settings = folder.parent / "config.yaml"
    return settings if folder.is_dir() and settings.is_file() else None


if __name__ == "__main__":
    main()
