"""`octet fetch`: put the model, data and packages of a run in one folder, for a machine without internet.

    DIR/hub/        the model and its teacher, as huggingface_hub caches them
        datasets/   the data, as `datasets` has prepared them
        wheels/     the packages of constraints.txt, for this Python and this platform
        manifest.json   every file with its size and SHA-256
        README.txt      the commands for the other machine

With HF_HOME=DIR the same settings run there, and the adapter names its base by its name instead of a path that exists
on one machine only. The same command continues with an incomplete folder.
"""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import constants

import trainer
from trainer.commands.options import add_settings_of_a_run
from trainer.config.command_line import choose_preset, resolve
from trainer.config.settings import Config, Model
from trainer.errors import ConfigError, DataError, ModelError
from trainer.machine import hardware
from trainer.machine.disk import amount
from trainer.machine.shipped import IS_INSTALLED, ROOT, TRAIN
from trainer.machine.visible import print
from trainer.model import hub
from trainer.plan import disk_and_ram, downloads
from trainer.problem.task import make_task
from trainer.watch.progress import PATIENCE_S, Progress

CONSTRAINTS = ROOT / "constraints.txt"
BUILD_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
NOT_LISTED = ("manifest.json", "README.txt")  # they describe the other files

README = """\
{what}

Made on {platform}, Python {python}, with
  octet fetch {arguments} --to DIR

Copy the folder with its links (rsync -a, or tar): {size} in {count} files. On the other machine, in the folder of
Octet or of its wheel, and with another place in these lines if this folder has another one there:

  {run}

Whether everything has arrived:

  octet fetch --verify {folder}
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
    if disk_and_ram.existing(folder) != folder:
        _make(folder)
    summary = [f"model   {fetch_model(config.model, folder)}"]
    if config.teacher_model:
        with hub.naming("teacher.name"):
            summary.append(f"teacher {fetch_model(config.teacher_model, folder)}")
    if config.teacher.adapter:
        summary.append(f"teacher {config.teacher.adapter}: an adapter on this machine; copy it yourself")
    summary.append(fetch_data(config))
    for line in summary:
        print(line, flush=True)
    if wheels:
        summary.append(fetch_wheels(requirements(), CONSTRAINTS, folder / "wheels"))
        print(summary[-1], flush=True)
    conclude(folder, summary, shlex.join(arguments), wheels)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--to {folder}", f"it cannot be made ({error.strerror})", "Choose another folder") from None


def fetch_model(model: Model, folder: Path) -> str:
    found = hub.find_model(model)
    if model.name == "nano":
        return "nano: it comes with Octet"
    if found.folder is None:
        _download(model, found, folder)
        found = hub.Found(hub.snapshot(model), found.sizes)
        _compare(model, found)
    elif hub.snapshot(model) is None:
        return f"{model.name}: a folder on this machine; copy it yourself"
    return f"{model.name}: {amount(sum(found.sizes.values()))} in {len(found.sizes)} files"


def _download(model: Model, found: hub.Found, folder: Path) -> None:
    free = disk_and_ram.free_disk(folder)
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
            f"the download broke off ({_first_line(error)})",
            "The same command goes on with it",
        ) from None


def _compare(model: Model, found: hub.Found) -> None:
    """Raise ModelError if a file is missing, or has another size than on the hub."""
    here = {name: found.folder / name for name in found.sizes} if found.folder else {}
    wrong = [name for name, file in here.items() if not file.is_file() or file.stat().st_size != found.sizes[name]]
    if wrong or not here:
        raise ModelError(
            f"model.name={model.name}",
            f"{', '.join(wrong) or 'its weights'} did not arrive whole",
            "The same command fetches what is missing",
        )


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
    state = f"{platform.platform()} {platform.python_version()} {' '.join(wanted)}\n{constraints.read_text()}"
    state = hashlib.sha256(state.encode()).hexdigest()
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


# ---------------------------------------------------------------- manifest and instructions


def conclude(folder: Path, summary: Sequence[str], arguments: str, wheels: bool) -> None:
    files = {str(file.relative_to(folder)): file for file in _listed(folder)}
    sums = _sums(files.values())
    listed = {name: {"bytes": file.stat().st_size, "sha256": sums[file.resolve()]} for name, file in files.items()}
    run = command(folder, arguments, wheels)
    made: dict[str, Any] = {"platform": platform.platform(), "python": platform.python_version()}
    made |= {"arguments": arguments, "run": run}
    (folder / "manifest.json").write_text(json.dumps({**made, "files": listed}, indent=1) + "\n")
    size = amount(sum(file.stat().st_size for file in set(map(Path.resolve, files.values()))))
    text = README.format(what="\n".join(summary), **made, folder=shlex.quote(str(folder)), size=size, count=len(listed))
    (folder / "README.txt").write_text(text)
    print(f"\nCopy {folder} ({size}) with its links, then, in the folder of Octet or of its wheel over there:\n  {run}")
    print(f"More in {folder / 'README.txt'}")


def command(folder: Path, arguments: str, wheels: bool) -> str:
    run = f"HF_HOME={shlex.quote(str(folder))} HF_HUB_OFFLINE=1 {TRAIN} {arguments}"
    if not wheels:
        return run
    packages = shlex.quote(str(folder / "wheels"))
    if IS_INSTALLED:  # there is no run_deepspeed.sh that installs the packages
        wheel = f"octet_grpo-{trainer.__version__}-py3-none-any.whl"
        return f"pip install --no-index --find-links {packages} {wheel} && {run}"
    return f"OCTET_WHEELS={packages} {run}"


def _listed(folder: Path) -> list[Path]:
    """Return all files, links of the cache included, because a copy may have files in their place."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix not in (".lock", ".incomplete"))
    return [file for file in files if str(file.relative_to(folder)) not in NOT_LISTED]


def _sums(files: Iterable[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file. Links are resolved, and a file with several links is read once."""
    sums, whole = {}, {file.resolve() for file in files}
    with Progress("checksums", sum(file.stat().st_size for file in whole), patience=PATIENCE_S) as progress:
        for file in whole:
            with file.open("rb") as content:
                digest = hashlib.sha256()
                while block := content.read(1 << 20):
                    digest.update(block)
                    progress.advance(len(block))
            sums[file] = digest.hexdigest()
    return sums


def verify(folder: Path) -> None:
    """Raise DataError if a file is missing or differs from the manifest."""
    try:
        listed = json.loads((folder / "manifest.json").read_text())["files"]
        expected = {name: str(entry["sha256"]) for name, entry in listed.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--verify {folder}", f"there is no whole manifest.json in it ({_first_line(error)})"
        ) from None
    if outside := [name for name in listed if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise DataError(f"--verify {folder}", f"manifest.json names {outside[0]!r}, which is outside", "Fetch it again")
    missing = [name for name in listed if not (folder / name).is_file()]
    sums = _sums(folder / name for name in listed if name not in missing)
    changed = [name for name in listed if name not in missing and sums[(folder / name).resolve()] != expected[name]]
    wrong = [*(f"{name} is missing" for name in missing), *(f"{name} has changed" for name in changed)]
    if wrong:
        raise DataError(
            f"--verify {folder}",
            f"{len(wrong)} of {len(listed)} files are not as they were fetched: {', '.join(wrong[:3])}",
            "Copy the folder again, with its links (rsync -a)",
        )
    print(f"{folder}: all {len(listed)} files are as they were fetched")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
