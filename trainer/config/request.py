"""The command line of `octet train` as a request: a preset or a run to resume, and settings."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.choose_preset import choose_preset
from trainer.config.resolve import overrides_of, resolve
from trainer.config.settings import RUNS, Config
from trainer.config.train_options import argument_parser
from trainer.errors import ConfigError
from trainer.machine import hardware

OF_A_WARMUP = {"run.steps": "warmup.steps", "run.epochs": "warmup.steps", "algorithm.lr": "warmup.lr"}
OF_A_WARMUP |= {f"eval.{key}": f"warmup.{key}" for key in ("every", "metric", "patience")}


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed command line."""

    config: Config
    preset: str
    reason: str  # the preset that was chosen automatically, and why; or the run that is resumed; else empty
    dry_run: bool = False
    json: bool = False
    resumes: Path | None = None  # the folder of the run to resume
    accepts_changes: bool = False  # resume although the user's code has changed
    is_python: bool = False  # train() was called, instead of a command
    only_here: bool = False  # its functions cannot be called from their copies, so no other process can have them
    on_step: Callable[[int, Mapping[str, float]], object] | None = None  # is called after each step

    @property
    def resolved(self) -> str:
        """Return the settings as YAML, with comments that say what is paid and what checks the rest."""
        return f"# {self.config.paid}\n# octet doctor checks the data and the machine\n{self.config.to_yaml()}"


def parse_command_line(arguments: Sequence[str]) -> Request:
    followers = [*arguments[1:], ""]
    separate = [  # `--resume run.steps=9` means the latest run with a setting, not a folder of that name
        "--resume=" if argument == "--resume" and "=" in follower and not os.path.isdir(follower) else argument
        for argument, follower in zip(arguments, followers)
    ]
    options = argument_parser().parse_intermixed_args(separate)
    options.overrides += [f"run.{name}=true" for name in ("strict_health", "strict_verdict") if vars(options)[name]]
    folder = None
    if options.resume is not None:
        config, folder = _resumed(options)
        preset, reason = folder.name, f"resuming {folder}"
    else:
        preset, why = (options.preset, "") if options.preset else choose_preset(hardware.detect())
        reason = f"preset {preset} ({why})" if why else ""
        config = resolve(preset, options.recipe, options.overrides)
    return Request(config, preset, reason, options.dry_run, options.json, folder, options.accept_changes)


def _resumed(options: argparse.Namespace) -> tuple[Config, Path]:
    """Return the settings of an earlier run with the overrides of this command line, and its folder."""
    folder = Path(os.path.expanduser(options.resume)) if options.resume else latest_run("--resume", ": --resume DIR")
    stored = folder / "config.yaml"
    if not os.path.isfile(stored):
        reason = "there is no config.yaml in it, so it is not the folder of a run"
        raise ConfigError(f"--resume {folder}", reason if folder.exists() else "there is no such folder")
    if options.preset or options.recipe:
        raise ConfigError("--resume", "the run's own config.yaml is the preset", "Leave --preset and --recipe out")
    config = resolve(str(stored), None, [*overrides_of({"run.dir": str(folder)}), *options.overrides])
    if config.is_warmup:
        refuse_replaced(options.overrides)
    if config.run.dir != folder:
        remedy = "Leave one of the two out; a job script, which sets run.dir, needs --resume FOLDER"
        raise ConfigError(f"run.dir={config.run.dir}", f"--resume continues in {folder}", remedy)
    return config, folder


def refuse_replaced(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a setting that a warm-up alone does not use, because it has its own one."""
    for text in overrides:
        if own := OF_A_WARMUP.get(text.partition("=")[0].strip()):
            raise ConfigError(text, "a warm-up alone does not use it", f"Write {own} in its place")


def latest_run(option: str, written: str) -> Path:
    runs = sorted(filter(os.path.isfile, RUNS.glob("*/config.yaml")), key=os.path.getmtime)
    if not runs:
        raise ConfigError(option, f"there is no run in {RUNS}/", f"Name the folder{written}")
    return runs[-1].parent
