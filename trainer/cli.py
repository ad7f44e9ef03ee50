"""The command `octet`, and how every command ends.

octet eval   how good a model is, with or without an adapter
octet merge  the adapter of a run, merged into its base
octet score  the rewards of completions from a file
octet play   write an answer yourself and see its rewards
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer import hub, quiet
from trainer.config import Config, resolve
from trainer.errors import CheckpointError, ConfigError, OctetError


def answering_errors(command: Callable[[], None], debug: bool = False) -> int:
    """Run a command. What went wrong is one clear message and status 2; the traceback is for `--debug`."""
    try:
        command()
    except OctetError as error:
        if debug:
            raise
        print(f"octet: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("octet: stopped.", file=sys.stderr)
        return 130
    return 0


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parsers = {"eval": _eval_parser, "merge": _merge_parser, "score": _score_parser, "play": _play_parser}
    if not arguments or arguments[0] not in parsers:
        print(f"{(__doc__ or '').strip()}\n\nEach has --help. Training is ./run_deepspeed.sh.")
        sys.exit(0 if arguments in (["-h"], ["--help"]) else 2)
    options = parsers[arguments[0]]().parse_intermixed_args(arguments[1:])
    sys.exit(answering_errors(lambda: options.command(options), options.debug))


def _eval_parser() -> argparse.ArgumentParser:
    parser = _parser("eval", "Greedy accuracy on held-out problems, with a 95 % interval.", _eval)
    parser.add_argument("--adapter", type=Path, help="the adapter folder of a run; its base is evaluated beside it")
    parser.add_argument("--problems", type=int, help="how many held-out problems")
    return parser


def _merge_parser() -> argparse.ArgumentParser:
    parser = _parser("merge", "Write the model with an adapter merged in, and compare the two.", _merge)
    parser.add_argument("--adapter", type=Path, required=True, help="the adapter folder of a run")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--problems", type=int, default=32, help="held-out problems for the comparison (default 32)")
    return parser


def _score_parser() -> argparse.ArgumentParser:
    parser = _light_parser("score", "Score the completions of a JSON lines file; see docs/rewards.md.", _score)
    parser.add_argument("file", help="each line has `completion` and `answer`; - is standard input")
    return _with_overrides(parser)


def _play_parser() -> argparse.ArgumentParser:
    parser = _light_parser("play", "Answer problems yourself and see what each reward makes of it.", _play)
    parser.add_argument("--data-dir", type=Path, help="a folder with train.jsonl and test.jsonl")
    return _with_overrides(parser)


def _light_parser(
    name: str, description: str, command: Callable[[argparse.Namespace], None]
) -> argparse.ArgumentParser:
    """For commands that need no model."""
    parser = argparse.ArgumentParser(prog=f"octet {name}", description=description, allow_abbrev=False)
    parser.set_defaults(command=command, data_dir=None)
    parser.add_argument("--task", help="nano (default) or gsm8k")
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
    parser.add_argument("--task", help="nano or gsm8k")
    parser.add_argument("--preset", help="take the other settings from this preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as task.data_dir=FOLDER")
    return parser


def _eval(options: argparse.Namespace) -> None:
    config = _settings(options)
    from trainer import commands

    commands.evaluate(config, options.adapter, as_json=options.json)


def _merge(options: argparse.Namespace) -> None:
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise ConfigError(f"--out {options.out}: it exists and is not empty. Name a new folder.")
    config = _settings(options)
    from trainer import commands

    commands.merge(config, options.adapter, options.out, as_json=options.json)


def _score(options: argparse.Namespace) -> None:
    config = _light_settings(options)
    from trainer import score

    score.score_file(config, options.file)


def _play(options: argparse.Namespace) -> None:
    config = _light_settings(options)
    hub.check(config)
    from trainer import play

    play.play(config)


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
            f"--adapter {options.adapter}: there is no adapter_config.json in it. Name the `adapter` folder of a run."
        )
    config = resolve(options.preset or _preset_for(options), None, [*overrides, *options.overrides])
    if not config.eval.problems:
        raise ConfigError("eval.problems=0: there is nothing to evaluate. Try --problems 256.")
    hub.check(config)
    quiet.quiet()
    return config


def _preset_for(options: argparse.Namespace) -> str | None:
    run = options.adapter.parent / "config.yaml" if options.adapter else None
    if run and run.is_file():
        return str(run)
    if options.adapter and not options.model:
        raise ConfigError(
            f"--adapter {options.adapter}: it has no run's config.yaml beside it. Name its base: --model."
        )
    return "nano" if options.model in (None, "nano") else None
