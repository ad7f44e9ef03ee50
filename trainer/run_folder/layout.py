"""The files and checkpoints of a run folder by name, and whether a run has saved something. Does not import torch."""

import os
import re
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from trainer.errors import CheckpointError, ConfigError

CHECKPOINT = re.compile(r"step_(\d{6,})")
# The names of all files and folders that a run writes into its folder.
FILES = re.compile(r"\.lock|tracked_run|.*\.(yaml|json|jsonl|md)|(metrics|samples)\.damaged|vllm-\d+\.log")
FOLDERS = re.compile(
    r"checkpoints|best|adapter|model|merged|warmup|samples|stacks|tensorboard|given|wandb|published|vllm_modules"
)
KINDS = {stat.S_IFLNK: "link", stat.S_IFIFO: "pipe", stat.S_IFDIR: "folder", stat.S_IFREG: "file"}


def refuse_what_is_not_its_own(folder: Path) -> None:
    """Raise ConfigError for a pipe, which would block the run, or a link, through which it would write elsewhere."""
    for path in folder.iterdir() if folder.is_dir() else ():
        is_file, is_folder = FILES.fullmatch(path.name), FOLDERS.fullmatch(path.name)
        with suppress(FileNotFoundError):  # a run that goes on here has replaced it meanwhile
            mode = path.lstat().st_mode
            if (is_file and not stat.S_ISREG(mode)) or (is_folder and not stat.S_ISDIR(mode)):
                wanted, kind = "file" if is_file else "folder", KINDS.get(stat.S_IFMT(mode), "device")
                reason = f"a run has a {wanted} of its own where {path} is a {kind}"
                raise ConfigError(f"run.dir={folder}", reason, "Move it away, or choose another folder")


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints of a run, the newest last."""
    folders = [entry for entry in _listed(folder / "checkpoints") if entry.is_dir(follow_symlinks=False)]
    steps = sorted((int(step[1]), entry.path) for entry in folders if (step := CHECKPOINT.fullmatch(entry.name)))
    return [Path(path) for _, path in steps]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}), so what the run has saved is not known"
        remedy = f"Give this user access: chmod u+rwx {shlex.quote(str(folder))}"
        raise CheckpointError(folder, reason, remedy) from None


def has_saved(folder: Path) -> bool:
    """Return True if a run has saved a checkpoint, or has exported its result."""
    saved = any(not entry.name.endswith(".partial") for entry in _listed(folder / "checkpoints"))
    return saved or any((folder / product).exists() for product in ("adapter", "model"))
