"""`octet fetch`: put the model, data and packages of a run in one folder, for a machine without internet.

    DIR/hub/        the model and its teacher, as huggingface_hub caches them
        datasets/   the data, as `datasets` has prepared them
        wheels/     the packages of constraints.txt, for this Python and this platform
        manifest.json   the checksum of every file
        README.txt      the commands for the other machine

With HF_HOME=DIR the same settings run there, and the adapter names its base by its name instead of a path that exists
on one machine only. The same command continues with an incomplete folder.
"""

from __future__ import annotations

import configparser
import os
import platform
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants

import trainer
from trainer.commands.options import add_settings_of_a_run
from trainer.config.command_line import choose_preset, resolve
from trainer.config.settings import Config, Model
from trainer.errors import ConfigError, DataError, ModelError
from trainer.machine import hardware, manifest
from trainer.machine.disk import amount
from trainer.machine.disk import size as size_of
from trainer.machine.shipped import IS_INSTALLED, ROOT, TRAIN
from trainer.machine.visible import print
from trainer.model import hub
from trainer.plan import downloads, preflight
from trainer.problem.task import make_task

CONSTRAINTS = ROOT / "constraints.txt"
BUILD_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
README = """\
{what}

Copy this folder with its links (rsync -a, or tar) to a machine of the same platform ({platform}) with Python {python},
check it there with `octet fetch --verify DIR`, and run in the folder of Octet, with its new place in this line:

  {run}
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet fetch --preset 8gb --to DIR"
    add_settings_of_a_run(parser)
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder to fill, or to go on filling")
    parser.add_argument("--no-wheels", action="store_true", help="leave the packages out")
    parser.add_argument(
        "--verify", type=Path, metavar="DIR", help="compare a copied folder with its manifest, and stop"
    )


def run(options: Namespace) -> None:
    if options.verify:
        verify(options.verify)
        return
    if options.to is None:
        raise ConfigError("--to", "it names the folder to fill", "Write --to DIR")
    preset = options.preset or choose_preset(hardware.detect())[0]
    config = resolve(preset, options.recipe, options.overrides)
    chosen = ["--preset", preset, *(["--recipe", options.recipe] if options.recipe else []), *options.overrides]
    fetch(config, chosen, options.to, wheels=not options.no_wheels)


def fetch(config: Config, arguments: Sequence[str], folder: Path, wheels: bool) -> None:
    if hub.is_offline():
        raise ConfigError("HF_HUB_OFFLINE=1", "nothing can be fetched with it", "Unset it")
    folder = folder.expanduser().absolute()
    constants.HF_HUB_CACHE = str(folder / "hub")  # HF_HOME stays, because the login is there
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # read when `datasets` is imported
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {folder}", f"it cannot be made ({error.strerror})", "Choose another folder") from None
    summary = [f"model   {fetch_model(config.model, folder)}"]
    if config.teacher_model:
        with hub.naming("teacher.name"):
            summary.append(f"teacher {fetch_model(config.teacher_model, folder)}")
    if config.teacher.adapter:
        summary.append(f"teacher {config.teacher.adapter}: an adapter on this machine; copy it yourself")
    summary.append(fetch_data(config))
    if wheels:
        summary.append(fetch_wheels(requirements(), CONSTRAINTS, folder / "wheels"))
    run = command(folder, shlex.join(arguments), wheels)
    made = {"platform": platform.platform(), "python": platform.python_version()}
    (folder / "README.txt").write_text(README.format(what="\n".join(summary), run=run, **made))
    manifest.seal(folder)
    print("\n".join(summary))
    print(
        f"\nCopy {folder} ({amount(size_of(folder))}) with its links, then, in the folder of Octet over there:\n  {run}"
    )


def fetch_model(model: Model, folder: Path) -> str:
    found = hub.find_model(model)
    if model.name == "nano":
        return "nano: it comes with Octet"
    if found.folder is None:
        _download(model, found, folder)
    elif hub.snapshot(model) is None:
        return f"{model.name}: a folder on this machine; copy it yourself"
    return f"{model.name}: {amount(sum(found.sizes.values()))} in {len(found.sizes)} files"


def _download(model: Model, found: hub.Found, folder: Path) -> None:
    free = preflight.free_disk(folder)
    if free < found.download:
        raise ConfigError(
            f"--to {folder}",
            f"{model.name} needs {amount(found.download)}, and {amount(free)} are free there",
            "Make room, or choose a folder on another disk",
        )
    import huggingface_hub

    try:
        huggingface_hub.snapshot_download(model.name, revision=model.revision, allow_patterns=list(found.sizes))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model.name={model.name}",
            f"the download broke off ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})",
            "The same command goes on with it",
        ) from None
    if hub.snapshot(model) is None:
        raise ModelError(f"model.name={model.name}", "it did not arrive whole", "Run the same command again")


def fetch_data(config: Config) -> str:
    sets = make_task(config.task).hub_sets()
    counts = [f"{data.split} {sum(1 for _ in data.records()):,}" for data in sets]
    for data in sets:
        if not downloads.is_prepared(data):
            raise DataError(f"task.name={config.task.name}", f"{data} did not arrive", "Run the same command again")
    if not counts:
        return f"data    {config.task.name}: made up by Octet, or files on this machine; copy those yourself"
    return f"data    {', '.join(dict.fromkeys(one.name for one in sets))}: {', '.join(counts)} problems"


# ---------------------------------------------------------------- packages


def requirements(setup: Path = ROOT / "setup.cfg") -> list[str]:
    """Return the packages that Octet needs, those for symbolic mathematics, and those that install them."""
    parser = configparser.ConfigParser()
    parser.read(setup)
    needed = parser["options"]["install_requires"].split() + parser["options.extras_require"]["math"].split()
    return [*BUILD_TOOLS, *needed]


def fetch_wheels(wanted: Sequence[str], constraints: Path, folder: Path) -> str:
    """Fetch the packages for this Python and this platform.

    DeepSpeed is published as source only, and its build imports torch, which it finds in this environment."""
    stamp = folder / ".complete"
    state = f"{' '.join(wanted)}\n{constraints.read_text()}"
    if not stamp.is_file() or stamp.read_text() != state:
        options = ["--constraint", str(constraints), "--wheel-dir", str(folder), "--find-links", str(folder)]
        folder.mkdir(parents=True, exist_ok=True)
        print("octet: pip fetches and builds the packages, which takes minutes", file=sys.stderr, flush=True)
        if "deepspeed" in wanted:
            _pip_wheel([*options, "--no-deps", "--no-build-isolation", "deepspeed"])
        _pip_wheel([*options, *wanted])
        stamp.write_text(state)
    files = list(folder.glob("*.whl"))
    return f"wheels  {len(files)} packages, {amount(sum(file.stat().st_size for file in files))}"


def _pip_wheel(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", *arguments]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        last = (answer.stderr.strip() or answer.stdout.strip()).splitlines()[-1:]
        raise ConfigError(
            "--to",
            f"pip could not bring the packages ({''.join(last)})",
            "The same command goes on; --no-wheels leaves the packages out",
        )


def command(folder: Path, arguments: str, wheels: bool) -> str:
    run = f"HF_HOME={shlex.quote(str(folder))} HF_HUB_OFFLINE=1 {TRAIN} {arguments}"
    if not wheels:
        return run
    packages = shlex.quote(str(folder / "wheels"))
    if IS_INSTALLED:  # there is no run_deepspeed.sh that installs the packages
        wheel = f"octet_grpo-{trainer.__version__}-py3-none-any.whl"
        return f"pip install --no-index --find-links {packages} {wheel} && {run}"
    return f"OCTET_WHEELS={packages} {run}"


def verify(folder: Path) -> None:
    """Raise DataError if a file is missing or differs from the manifest."""
    if wrong := manifest.damage(folder):
        raise DataError(f"--verify {folder}", wrong[:500], "Copy the folder again, with its links (rsync -a)")
    print(f"{folder}: all files are as they were fetched")
