"""Options that several commands share."""

import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.config.command_line import latest_run
from trainer.config.sections.task import BUILT_IN
from trainer.errors import ConfigError
from trainer.machine.visible import print

TASKS = f"{', '.join([*BUILT_IN][:-2])}, reasoning_gym:GENERATOR or FILE.py:FUNCTION"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")  # which draw an SVG as a PNG


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
    """Take the latest run if none is named. A setting or a question in its place is one of the overrides."""
    if "overrides" in options and {*"= "} & {*str(getattr(options, "run", ""))} and not options.run.exists():
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


def converted(svg: bytes, name: str, kind: str) -> bytes | None:
    """Return a picture as PDF or PNG. Without a program that can, return None, and say what to install."""
    for converter in (["rsvg-convert", "-f", kind], ["cairosvg", "-f", kind, "-"]):  # from stdin to stdout
        if shutil.which(converter[0]):
            made = subprocess.run(converter, input=svg, capture_output=True, check=False)
            if made.returncode == 0:
                return made.stdout
    if kind == "png" and (picture := _of_browser(svg)):
        return picture
    remedy = f"`pip install cairosvg`, then `cairosvg {name}.svg -o {name}.{kind}`"
    reason = f"no rsvg-convert, cairosvg{' or Chromium' * (kind == 'png')} makes a {kind.upper()} of it here: {remedy}"
    print(f"octet: an SVG, because {reason}", file=sys.stderr)
    return None


def _of_browser(svg: bytes) -> bytes | None:
    """Return a picture as PNG, by a browser that is a program of this machine."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    size = re.search(rb'width="(\d+)[.\d]*" height="(\d+)', svg)
    if not browser or not size:
        return None
    with TemporaryDirectory(prefix="octet-") as folder:
        drawn, made = Path(folder) / "drawn.svg", Path(folder) / "made.png"
        drawn.write_bytes(svg)
        options = ["--headless", "--hide-scrollbars", f"--user-data-dir={folder}/profile", f"--screenshot={made}"]
        options += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses to start as root with it
        command = [browser, *options, f"--window-size={','.join(side.decode() for side in size.groups())}"]
        subprocess.run([*command, drawn.as_uri()], capture_output=True, check=False)
        return made.read_bytes() if made.is_file() else None
