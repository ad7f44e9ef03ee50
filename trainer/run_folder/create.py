"""Create a run folder: its name, config.yaml, machine.json, and copies of the user's data and code; or say how the run
that is already in the folder continues."""

import json
import os
import platform
import shutil
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch

from trainer.config import paths
from trainer.config.request import Request
from trainer.config.settings import RUNS, Config
from trainer.errors import counted
from trainer.machine import disk, hardware
from trainer.machine.installed_files import CHECKOUT
from trainer.model import hub
from trainer.ranks import distributed
from trainer.run_folder import changed_settings, journal, layout
from trainer.run_folder.provenance import code_of, files_of, versions
from trainer.watch.phases import total_memory

MACHINE = "machine.json"
LARGEST = 5_000_000  # bytes of data that are copied into the run folder


def say_how_it_continues(request: Request, folder: Path) -> None:
    """Print the other settings with which a run continues, or how many steps are lost if it starts again."""
    if not distributed.is_main():
        return
    if others := changed_settings.meaning(changed_settings.changes(folder, request.config)):
        lines = [f"octet: run.dir={folder}: it continues with other settings:", *others]
        print("\n".join(lines), file=sys.stderr if request.json else sys.stdout, flush=True)
    steps = sum(b'{"step": 0,' not in line for line in journal.lines_of(folder / "metrics.jsonl"))
    if steps and not layout.has_saved(folder):
        journal.warn(f"{folder}: nothing of its {counted(steps, 'step')} was saved, so it starts again")


def folder_of(request: Request) -> Path:
    """Return the run folder, the same on every rank. Without run.dir it is new, even if two runs start at once."""
    name = request.config.run.dir
    if name is None:
        dated = f"{Path(request.preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        names = (RUNS / f"{dated}{ending}" for ending in chain([""], (f"-{number}" for number in count(2))))
        name = next(filter(_is_new, names)) if distributed.is_main() else RUNS
    return Path(distributed.gather(str(name))[0])


def _is_new(folder: Path) -> bool:
    """Create a folder, or return False if it exists. Other errors are left to the attempt to lock it."""
    with suppress(OSError):
        folder.mkdir(parents=True)
        return True
    return not folder.exists()


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration into the run folder, after everything is loaded: an error before that leaves none."""
    if distributed.is_main():
        packages, commit = [f"{name} {number}" for name, number in versions().items()], revision()
        made_with = ", ".join([*packages, f"git revision {commit}" if commit else "no git revision"])
        machine = f"{counted(distributed.world_size(), 'rank')}; {hardware.detect()}"
        text = f"# {made_with}\n# {machine}\n{_movable(config, folder).to_yaml(folder)}"
        if not (folder / "config.yaml").exists():
            disk.mark_as_made_here(folder)
        disk.replace(folder / "config.yaml", text.encode())


def _movable(config: Config, folder: Path) -> Config:
    """Copy small data and code into the run folder, and return settings that name the copy of the data."""
    _copy_code(config, folder)
    copied: dict[str, Any] = {}
    for name in ("path", "test_path", "data_dir"):
        source = Path(getattr(config.task, name) or "-").expanduser().absolute()
        place, files = folder / paths.GIVEN / name / source.name, paths.data_files(source)
        is_outside = os.path.isabs(paths.place(folder, str(source)))  # a resumed run reads its copy
        root, to = (source, place) if source.is_dir() else (source.parent, place.parent)
        is_below = all(file.is_relative_to(root) for file in files)  # and not of a pattern of folders
        if files and is_outside and is_below and sum(file.stat().st_size for file in files) <= LARGEST:
            disk.remove(place.parent)
            for file in files:
                copy = to / file.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                disk.replace(copy, file.read_bytes())
            copied[f"task.{name}"] = place if name == "data_dir" else str(place)
    return config.changed(copied)


def _copy_code(config: Config, folder: Path) -> None:
    """Copy the user's code into the run folder, where `paths.placed` finds it if the original is missing."""
    files: dict[Path, Path] = {}
    for code, names in code_of(config).items():
        is_free = all(paths.CODE / name not in files for name in names)
        files |= {(paths.CODE if is_free else paths.apart(code)) / name: code / name for name in names}
    outside = {copy: path for copy, path in files.items() if os.path.isabs(paths.place(folder, str(path)))}
    if outside and sum(path.stat().st_size for path in outside.values()) <= LARGEST:
        if len(outside) == len(files):  # otherwise some of the existing copies are in use
            disk.remove(folder / paths.CODE)
        for copy, path in outside.items():
            (folder / copy).parent.mkdir(parents=True, exist_ok=True)
            disk.replace(folder / copy, path.read_bytes())


def write_machine(folder: Path, config: Config) -> None:
    """Write what else the first step depends on, beside settings and data, for `octet repro`."""
    if not distributed.is_main():
        return
    device = torch.cuda.get_device_name() if distributed.on_gpu() else ""
    device = device or f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    facts: dict[str, Any] = {"base weights": hub.fingerprint(config.model)[:16], **versions()}
    facts |= {"python": platform.python_version(), "git revision": revision() or "none"}
    facts |= {"ranks": distributed.world_size(), "threads": torch.get_num_threads(), "device": device}
    facts |= {"processor": hardware.processor(), "memory": round(total_memory() / 1e9, 2)}
    facts |= {f"checksum of {name}": checksum for name, checksum in files_of(config, folder).items()}
    disk.replace(folder / MACHINE, (json.dumps(facts, indent=2) + "\n").encode())


def revision() -> str:
    """Return the git revision of the checkout; "" without a repository or without git."""
    if not (CHECKOUT / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
