"""Options that several commands share."""

from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import ConfigError

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


@contextmanager
def writing(path: Path, option: str = "--out") -> Iterator[None]:
    """Raise ConfigError if what `--out` or `--to` names cannot be written."""
    try:
        yield
    except OSError as error:
        place = error.filename2 or error.filename or path  # the file in the folder, and not its temporary name
        reason = f"it cannot be written ({error.strerror})"
        raise ConfigError(f"{option} {place}", reason, "Name another place") from None
