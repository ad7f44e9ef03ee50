"""Options that several commands share."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.config.command_line import latest_run
from trainer.errors import ConfigError
from trainer.machine.visible import print

TASKS = (
    "nano, addition, gsm8k, gsm8k-renumbered, math, multiple_choice, records, reasoning_gym:GENERATOR or "
    "FILE.py:FUNCTION"
)


def add_overrides(parser: ArgumentParser, example: str = "task.data_dir=FOLDER") -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"settings, such as {example}")


def add_settings_of_a_run(parser: ArgumentParser) -> None:
    parser.add_argument("--preset", help="by default the one for this hardware")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    add_overrides(parser, "rollout.group_size=16")


def add_run(parser: ArgumentParser, what: str = "a run folder") -> None:
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=f"{what} (default: the latest run)")


def add_runs(parser: ArgumentParser, what: str = "run folders") -> None:
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=f"{what} (default: the latest run)")


def latest() -> Path:
    """Return the latest run, and say which it is."""
    run = latest_run("RUN", "RUN")
    print(f"octet: the latest run: {run}", file=sys.stderr)
    return run


def fill_in_run(options: Namespace) -> None:
    """Take the latest run if none is named. A setting in its place is one of the overrides."""
    if "=" in str(getattr(options, "run", "")) and not options.run.exists():
        options.overrides.insert(0, str(options.run))
        options.run = None
    if getattr(options, "run", "") is None:
        options.run = latest()
    if getattr(options, "runs", "") == []:
        options.runs = [latest()]


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Raise ConfigError if what `--out` or `--to` names cannot be written."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or path  # the file in the folder, and not its temporary name
        reason = f"it cannot be written ({error.strerror})"
        raise ConfigError(f"{option} {place}", reason, "Name another place") from None
