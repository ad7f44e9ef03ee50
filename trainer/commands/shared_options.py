"""Options that several commands share."""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainer.config.request import latest_run
from trainer.config.sections.task import BUILT_IN
from trainer.errors import ConfigError
from trainer.machine.safe_text import print

TASKS = f"{', '.join([*BUILT_IN][:-2])}, reasoning_gym:GENERATOR or FILE.py:FUNCTION"


def options_of(command: str, **chosen: Any) -> Namespace:
    """Return the options of a command that Python calls: its defaults, and those that were chosen."""
    parser = ArgumentParser()
    import_module(f"trainer.commands.{command}").add_arguments(parser)
    defaults = {one.dest: one.default for one in parser._actions if one.dest != "help"}
    return Namespace(**{**defaults, **chosen})


def positive(text: str) -> int:
    """Convert the text of an option, as a `type` of argparse."""
    if (number := int(text)) < 1:
        raise ArgumentTypeError(f"{text}: it must be at least 1")
    return number


def add_overrides(parser: ArgumentParser, example: str = "task.data_dir=FOLDER") -> None:
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=f"settings, such as {example}")


def add_settings_of_a_run(parser: ArgumentParser, preset: str | None = None) -> None:
    parser.add_argument("--preset", default=preset, help=f"by default {preset or 'the one for this hardware'}")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    add_overrides(parser, "rollout.group_size=16")


def words_of(preset: str, recipe: str | None, overrides: Sequence[str]) -> list[str]:
    """Return the arguments of a command that starts a run with these settings."""
    return ["--preset", preset, *(["--recipe", recipe] if recipe else []), *overrides]


def add_run(parser: ArgumentParser, what: str = "a run folder") -> None:
    # a text: a Path would turn the // of a question or an address into /
    parser.add_argument("run", nargs="?", metavar="RUN", help=f"{what} (default: the latest run)")


def add_runs(parser: ArgumentParser, what: str = "run folders") -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"{what} (default: the latest run)")


def latest() -> Path:
    """Return the latest run, and print its folder."""
    run = latest_run("RUN", " of one")
    print(f"octet: the latest run: {run}", file=sys.stderr)
    return run


def pop_folder(overrides: list[str]) -> Path | None:
    """Remove the folder from among settings, and return it, or None if there is none."""
    named = next((text for text in overrides if "=" not in text or os.path.isdir(text)), None)
    return Path(overrides.pop(overrides.index(named))) if named else None


def fill_in_run(options: Namespace) -> None:
    """Use the latest run if none is named, and expand `~`. A setting or a question in the place of RUN is moved to the
    overrides, and a RUN that follows settings is taken from there."""
    for name, value in vars(options).items():
        if isinstance(value, Path):
            setattr(options, name, Path(os.path.expanduser(value)))  # the shell leaves `~` after an equals sign
    named = getattr(options, "run", None) or ""
    if "overrides" in options and {*"= "} & {*named} and not os.path.exists(named):
        is_setting = "=" in named.partition(" ")[0]  # and no question, whose next word may be the name of a folder
        behind = next((text for text in options.overrides if is_setting and "=" not in text), "")
        options.run = options.overrides.pop(options.overrides.index(behind)) if os.path.isdir(behind) else None
        options.overrides.insert(0, named)
    if "run" in options:
        options.run = latest() if options.run is None else Path(options.run)
    if getattr(options, "runs", "") == []:
        options.runs = [latest()]


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Raise ConfigError, with the name of the option, if the path cannot be written."""
    try:
        yield
    except OSError as error:
        target = str(error.filename2 or error.filename or path).removesuffix(".partial")  # not the temporary name
        reason = f"it cannot be written ({error.strerror})"
        raise ConfigError(f"{option} {target}", reason, "Name another place") from None


def must_be_empty(out: Path, is_replaced: bool = True) -> None:
    """Raise ConfigError, before any work, if no result can be written there."""
    if is_replaced and (out.is_symlink() or out.is_mount()):
        reason = "it is a link or a mount point, which a new folder cannot replace"
        raise ConfigError(f"--out {out}", reason, "Name a folder in it")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}", "it exists and is not empty", "Delete it, or name a new folder")
    must_be_writable(out)


def must_be_writable(out: Path) -> None:
    """Raise an error, before any work, if nothing can be written into this folder."""
    nearest = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    try:
        with TemporaryDirectory(dir=nearest):  # each rank of `octet eval` looks, so it has a name of its own
            pass
    except OSError as error:
        raise ConfigError(f"--out {out}", f"it cannot be written ({error.strerror})", "Name another place") from None
