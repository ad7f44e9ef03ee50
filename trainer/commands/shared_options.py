"""Options that several commands share."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.config.request import latest_run
from trainer.config.sections.task import BUILT_IN
from trainer.errors import ConfigError
from trainer.machine.safe_text import print

TASKS = f"{', '.join([*BUILT_IN][:-2])}, reasoning_gym:GENERATOR or FILE.py:FUNCTION"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")  # they can render an SVG as a PNG


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


def latest(option: str = "RUN") -> Path:
    """Return the latest run, and print its folder. `option` can name another."""
    run = latest_run(option, option)
    print(f"octet: the latest run: {run}", file=sys.stderr)
    return run


def fill_in_run(options: Namespace) -> None:
    """Use the latest run if none is named, and expand `~`. A setting or a question in place of RUN is moved to the
    overrides."""
    for name, value in vars(options).items():
        if isinstance(value, Path):
            setattr(options, name, Path(os.path.expanduser(value)))  # the shell leaves `~` after an equals sign
    named = getattr(options, "run", None) or ""
    if "overrides" in options and {*"= "} & {*named} and not os.path.exists(named):
        options.overrides.insert(0, named)
        options.run = None
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


def converted(svg: bytes, place: Path, kind: str) -> bytes | None:
    """Return a picture as PDF or PNG. If no program here can convert it, print what to install and return None."""
    for converter in (["rsvg-convert", "-f", kind], ["cairosvg", "-f", kind, "-"]):  # from stdin to stdout
        if shutil.which(converter[0]):
            made = subprocess.run(converter, input=svg, capture_output=True, check=False)
            if made.returncode == 0:
                return made.stdout
    if kind == "png" and (picture := _rendered_by_browser(svg)):
        return picture
    source, target = (shlex.quote(f"{place}.{end}") for end in ("svg", kind))
    remedy = f"`pip install cairosvg`, then `cairosvg {source} -o {target}`"
    print(f"octet: only an SVG, because no program here converts it. Try {remedy}", file=sys.stderr)
    return None


def _rendered_by_browser(svg: bytes) -> bytes | None:
    """Return a picture as PNG if a browser is installed that can render it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    size = re.search(rb'width="(\d+)[.\d]*" height="(\d+)', svg)
    if not browser or not size:
        return None
    with TemporaryDirectory(prefix="octet-") as folder:
        source, target = Path(folder) / "source.svg", Path(folder) / "target.png"
        source.write_bytes(svg)
        options = ["--headless", "--hide-scrollbars", f"--user-data-dir={folder}/profile", f"--screenshot={target}"]
        options += ["--no-sandbox"] * (os.geteuid() == 0)  # as root, Chromium does not start with its sandbox
        command = [browser, *options, f"--window-size={','.join(side.decode() for side in size.groups())}"]
        subprocess.run([*command, source.as_uri()], capture_output=True, check=False)
        return target.read_bytes() if target.is_file() else None
