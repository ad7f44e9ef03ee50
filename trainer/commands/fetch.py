"""`octet fetch`: collect the model, data and packages of a run in a folder, for a machine without internet.

With HF_HOME=DIR the same settings run there, and the adapter refers to its base by name instead of a path that exists
on one machine only. docs/offline.md lists what is in the folder.
"""

import os
import platform
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, snapshot_download

import trainer
from trainer.commands.shared_options import add_settings_of_a_run, words_of, writing
from trainer.config.choose_preset import choose_preset
from trainer.config.resolve import resolve
from trainer.config.settings import Model, TaskSettings
from trainer.errors import ConfigError, DataError, ModelError
from trainer.machine import disk, hardware, manifest
from trainer.machine.installed_files import CONSTRAINTS, IS_INSTALLED, packages_needed
from trainer.machine.safe_text import print
from trainer.model import hub
from trainer.plan import preflight
from trainer.problem.task import make_task

BUILD_TOOLS = ("pip", "setuptools", "wheel", "ninja", "packaging")
README = """\
{what}

Copy this folder with its links (rsync -a, or tar) to a machine of the same platform ({platform}) with Python {python},
run this in the folder of Octet, with the new path of this folder, and check the copy with `octet fetch --verify DIR`:

  {run}
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet fetch --preset 8gb --to DIR"
    add_settings_of_a_run(parser)
    either = parser.add_mutually_exclusive_group(required=True)
    either.add_argument("--to", type=Path, metavar="DIR", help="the folder to fill or complete")
    either.add_argument("--verify", type=Path, metavar="DIR", help="only compare a copied folder with its manifest")
    parser.add_argument("--no-wheels", action="store_true", help="leave the packages out")


def run(options: Namespace) -> None:
    if options.verify:
        if not options.verify.is_dir():
            remedy = "Name the one that octet fetch has filled"
            raise ConfigError(f"--verify {options.verify}", "there is no such folder", remedy)
        if wrong := manifest.damage(options.verify):
            remedy = "Copy the folder again, with its links (rsync -a)"
            raise DataError(f"--verify {options.verify}", wrong[:500], remedy)
        print(f"{options.verify}: all files are as they were fetched")
        return
    if constants.is_offline_mode():
        raise ConfigError("HF_HUB_OFFLINE=1", "nothing can be fetched with it", "Unset it")
    preset = options.preset or choose_preset(hardware.detect())[0]
    config = resolve(preset, options.recipe, options.overrides)
    folder = options.to.absolute()
    constants.HF_HUB_CACHE = str(folder / "hub")  # HF_HOME is unchanged, because it holds the login
    os.environ["HF_DATASETS_CACHE"] = str(folder / "datasets")  # read when `datasets` is imported
    with writing(folder, "--to"):
        folder.mkdir(parents=True, exist_ok=True)
    summary = [f"model   {fetch_model(config.model, folder)}"]
    if config.teacher_model:
        with hub.naming("teacher.name"):
            summary.append(f"teacher {fetch_model(config.teacher_model, folder)}")
    for name, adapter in {"adapter": config.lora.start, "teacher": config.teacher.adapter}.items():
        if adapter:
            summary.append(f"{name} {adapter}: an adapter on this machine; copy it yourself")
    summary.append(fetch_data(config.task))
    if not options.no_wheels:
        summary.append(fetch_wheels(requirements(), folder / "wheels"))
    again = command(folder, shlex.join(words_of(preset, options.recipe, options.overrides)), not options.no_wheels)
    made = {"platform": platform.platform(), "python": platform.python_version()}
    (folder / "README.txt").write_text(README.format(what="\n".join(summary), run=again, **made))
    manifest.seal(folder)
    size = disk.amount(disk.size(folder))
    print(*summary, f"\nCopy {folder} ({size}) with its links, then, in the folder of Octet over there:", sep="\n")
    print(f"  {again}")


def fetch_model(model: Model, folder: Path) -> str:
    found = hub.find_model(model, "Fetch it on a machine with internet.")
    if model.name == "nano":
        return "nano: it comes with Octet"
    if found.folder is None:
        free = preflight.free_disk(folder)
        if free < found.download:
            reason = f"{model.name} needs {disk.amount(found.download)}, and {disk.amount(free)} are free there"
            raise ConfigError(f"--to {folder}", reason, "Make room, or choose a folder on another disk")
        try:
            snapshot_download(model.name, revision=model.revision, allow_patterns=list(found.sizes))
        except (OSError, ValueError, RuntimeError) as error:
            reason = f"the download failed ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
            raise ModelError(f"model.name={model.name}", reason, "The same command continues it") from None
    elif hub.snapshot(model) is None:
        return f"{model.name}: a folder on this machine; copy it yourself"
    return f"{model.name}: {disk.amount(sum(found.sizes.values()))} in {len(found.sizes)} files"


def fetch_data(settings: TaskSettings) -> str:
    sets = make_task(settings).hub_sets()
    counts = [f"{data.split} {sum(1 for _ in data.records()):,}" for data in sets]
    if not counts:
        return f"data    {settings.name}: generated by Octet, or files on this machine; copy those yourself"
    return f"data    {', '.join(dict.fromkeys(one.name for one in sets))}: {', '.join(counts)} problems"


def requirements() -> list[str]:
    """Return the packages that Octet needs, those for symbolic mathematics, and those that install them."""
    return [*BUILD_TOOLS, *packages_needed(), *packages_needed("math")]


def fetch_wheels(wanted: Sequence[str], folder: Path) -> str:
    """Let pip fetch the packages for this Python and platform, and build those without a wheel. Packages that are in
    the folder already are reused. DeepSpeed is published as source only, and its build imports torch, so it is built
    in this environment."""
    print("octet: pip fetches and builds the packages, which takes minutes", file=sys.stderr, flush=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    pip += ["--constraint", str(CONSTRAINTS), "--wheel-dir", str(folder), "--find-links", str(folder)]
    alone = [["--no-deps", "--no-build-isolation", "deepspeed"]] if "deepspeed" in wanted else []
    for packages in (*alone, wanted):
        answer = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            last = (answer.stderr.strip() or answer.stdout.strip()).splitlines()[-1:]
            reason = f"pip could not fetch or build the packages ({''.join(last)})"
            raise ConfigError("--to", reason, "The same command continues; --no-wheels leaves the packages out")
    files = list(folder.glob("*.whl"))
    return f"wheels  {len(files)} packages, {disk.amount(sum(file.stat().st_size for file in files))}"


def command(folder: Path, arguments: str, wheels: bool) -> str:
    train = "octet train" if IS_INSTALLED else "./run_deepspeed.sh"
    run = f"HF_HOME={shlex.quote(str(folder))} HF_HUB_OFFLINE=1 {train} {arguments}"
    if not wheels:
        return run
    packages = shlex.quote(str(folder / "wheels"))
    if IS_INSTALLED:  # without run_deepspeed.sh, which installs the packages
        wheel = f"octet_grpo-{trainer.__version__}-py3-none-any.whl"
        return f"pip install --no-index --find-links {packages} {wheel} && {run}"
    return f"OCTET_WHEELS={packages} {run}"
