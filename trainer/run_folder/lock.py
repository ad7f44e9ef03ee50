"""Claim a run folder for one run at a time, and refuse one that holds a run with other settings."""

import errno
import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

import torch

from trainer.config import paths
from trainer.config.command_line import Request
from trainer.config.settings import RUNS, Config
from trainer.errors import ConfigError, counted
from trainer.machine import disk, hardware
from trainer.machine.shipped import CHECKOUT
from trainer.model import hub
from trainer.ranks import distributed, slurm
from trainer.run_folder import previous_run
from trainer.run_folder.provenance import code_of, files_of, versions

MACHINE = "machine.json"
LARGEST = 5_000_000  # bytes of data that are copied into the run folder
LEFTOVER_S = 120.0  # how long a requeued job waits for the processes of its last start to end

_held: dict[Path, IO[str]] = {}  # the folders that this process has claimed, and their locks, open until it ends


def claim(request: Request) -> Path:
    """Lock the run folder and return it. Raise ConfigError if it is in use, or saved with other settings."""
    folder = folder_of(request)
    distributed.keep_stacks_in(folder / "stacks")
    previous_run.refuse_what_is_not_its_own(folder)
    previous_run.refuse_other_settings(folder, request.config)
    if not request.resumes:
        previous_run.refuse_to_lengthen(folder, request.config)
    if distributed.is_main():
        _lock(folder)
        if others := previous_run.meaning(previous_run.changes(folder, request.config)):
            said = "\n".join([f"octet: run.dir={folder}: it goes on with other settings:", *others])
            print(said, file=sys.stderr if request.json else sys.stdout, flush=True)
        if lost := previous_run.lost_steps(folder):
            lost_all = f"nothing of its {counted(lost, 'step')} was saved"
            print(f"octet: run.dir={folder}: {lost_all}; it begins anew", file=sys.stderr)
    distributed.barrier()
    return folder


def folder_of(request: Request) -> Path:
    """Return the run folder, the same on every rank. One without a name is new, also if two start in one second."""
    name = request.config.run.dir
    if name is None:
        dated = f"{Path(request.preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        names = (RUNS / f"{dated}{ending}" for ending in chain([""], (f"-{number}" for number in count(2))))
        name = next(filter(_is_new, names)) if distributed.is_main() else RUNS
    return Path(distributed.gather(str(name))[0])


def _is_new(folder: Path) -> bool:
    """Make a folder, and return False if there is one. Whether it can be written is found when it is locked."""
    with suppress(OSError):
        folder.mkdir(parents=True)
        return True
    return not folder.exists()


def is_ours(folder: Path) -> bool:
    """True if this process has claimed the folder, so that no other run writes into it."""
    return folder.resolve() in _held


def write_config(folder: Path, config: Config) -> None:
    """Write the configuration into the run folder. Called when everything is loaded, so that a mistake leaves none."""
    if distributed.is_main():
        machine = f"{counted(distributed.world_size(), 'rank')}; {hardware.detect()}"
        text = f"# {provenance()}\n# {machine}\n{_movable(config, folder).to_yaml(folder)}"
        disk.replace(folder / "config.yaml", text.encode())


def _movable(config: Config, folder: Path) -> Config:
    """Copy small data and code into the run folder, and return settings that name the copy of the data."""
    _copy_code(config, folder)
    copied: dict[str, Any] = {}
    for name in ("path", "test_path", "data_dir"):
        source = Path(getattr(config.task, name) or "-").expanduser().absolute()
        place, files = folder / paths.GIVEN / name / source.name, previous_run.data_files(source)
        is_outside = os.path.isabs(paths.place(folder, str(source)))  # a run that goes on reads its copy
        if files and is_outside and sum(file.stat().st_size for file in files) <= LARGEST:
            disk.remove(place.parent)
            to = place if source.is_dir() else place.parent
            to.mkdir(parents=True)
            for file in files:
                disk.replace(to / file.name, file.read_bytes())
            copied[name] = place if name == "data_dir" else str(place)
    return config.model_copy(update={"task": config.task.model_copy(update=copied)})


def _copy_code(config: Config, folder: Path) -> None:
    """Copy the user's code for whoever has the folder and not the code: `paths.placed` finds it."""
    files: dict[Path, Path] = {}
    for code, names in code_of(config).items():
        is_free = all(paths.CODE / name not in files for name in names)
        files |= {(paths.CODE if is_free else paths.apart(code)) / name: code / name for name in names}
    outside = {copy: path for copy, path in files.items() if os.path.isabs(paths.place(folder, str(path)))}
    if outside and sum(path.stat().st_size for path in outside.values()) <= LARGEST:
        if len(outside) == len(files):  # otherwise the run needs copies that it has
            disk.remove(folder / paths.CODE)
        for copy, path in outside.items():
            (folder / copy).parent.mkdir(parents=True, exist_ok=True)
            disk.replace(folder / copy, path.read_bytes())


def write_machine(folder: Path, config: Config) -> None:
    """Write what the first step of a run depends on beside its settings and data, for `octet repro`."""
    if not distributed.is_main():
        return
    device = torch.cuda.get_device_name() if distributed.on_gpu() else ""
    device = device or f"CPU with {torch.backends.cpu.get_cpu_capability()}"
    found: dict[str, Any] = {"base weights": hub.fingerprint(config.model)[:16], **versions()}
    found |= {"python": platform.python_version()}
    found |= {"git revision": revision() or "none", "ranks": distributed.world_size()}
    found |= {"threads": torch.get_num_threads(), "device": device}
    found |= {f"checksum of {name}": checksum for name, checksum in files_of(config, folder).items()}
    disk.replace(folder / MACHINE, (json.dumps(found, indent=2) + "\n").encode())


def _lock(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a+", opener=disk.not_a_link)  # noqa: SIM115  open until the process ends
    except OSError as error:
        reason = f"it cannot be written ({error.strerror})"
        raise ConfigError(f"run.dir={folder}", reason, "Choose another folder") from None
    deadline = time.monotonic() + (LEFTOVER_S if slurm.restarts() else 0)
    while not _is_free(lock):
        if time.monotonic() > deadline:
            reason = "another run is writing to it"
            raise ConfigError(f"run.dir={folder}", reason, "Wait for it, or choose another folder")
        time.sleep(0.5)
    _held[folder.resolve()] = lock
    distributed.before_disconnect(partial(_release, folder.resolve()))


def _release(folder: Path) -> None:
    """Unlock a folder at the end of its run: a process that a reward has forked, and left behind, has the lock, too."""
    if lock := _held.pop(folder, None):
        with lock, suppress(OSError):  # of a file system without locks
            fcntl.flock(lock, fcntl.LOCK_UN)


def _is_free(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
        warning = f"{Path(lock.name).parent}: its file system has no locks ({error.strerror})"
        print(f"octet: warning: {warning}. Make sure that no other run writes there.", file=sys.stderr, flush=True)
    return True


def provenance() -> str:
    """Return a line with the versions of Octet and of the packages that it trains with."""
    packages = [f"{name} {number}" for name, number in versions().items()]
    return ", ".join([*packages, f"git revision {found}" if (found := revision()) else "no git revision"])


def revision() -> str:
    """Return the git revision of the checkout; "" without a repository or without git."""
    if not (CHECKOUT / ".git").exists() or shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
