"""What an earlier run has left in a run folder: its settings, and whether a run can go on from it. No torch."""

import filecmp
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.command_line import flat, resolve, validated
from trainer.config.paths import CODE, DATA, PATHS, file_of, placed, stored
from trainer.config.read_yaml import written
from trainer.config.settings import Config, Vllm
from trainer.errors import CheckpointError, ConfigError, OctetError
from trainer.machine import manifest
from trainer.machine.visible import visible
from trainer.run_folder.journal import VERDICT

CHECKPOINT = re.compile(r"step_(\d{6,})")
# What a run writes into its folder.
FILES = re.compile(r"\.lock|tracked_run|.*\.(yaml|json|jsonl|md)|(metrics|samples)\.damaged|vllm-\d+\.log")
FOLDERS = re.compile(
    r"checkpoints|best|adapter|model|merged|warmup|samples|stacks|tensorboard|given|wandb|published|vllm_modules"
)

KINDS = {stat.S_IFLNK: "link", stat.S_IFIFO: "pipe", stat.S_IFDIR: "folder", stat.S_IFREG: "file"}

# Settings that may change when a run is resumed, because no step that is done depends on them, and what that means for
# the steps to come.
LENGTH = "the schedule of the learning rate is stretched to the new length"
BUDGET = "answers may get a grade that would have had none, or the other way round"
SERVER = "what samples may round in another way; the policy is the same"
FROM_HERE_ON = {
    "run.steps": LENGTH,
    "run.epochs": LENGTH,
    "eval.problems": "accuracies before and after it are not compared, so the best and the patience begin anew",
    "eval.every": "the best is one of other steps",
    "eval.metric": "the best is chosen by it",
    "eval.patience": "the run may end after another step",
    "reward.judge.timeout_s": BUDGET,
    "reward.judge.retries": BUDGET,
    "reward.judge.max_requests": BUDGET,
    "reward.judge.max_tokens": BUDGET,
} | {f"rollout.vllm.{key}": SERVER for key in Vllm.model_fields}
NO_EFFECT = {f"run.{key}" for key in ("dir", "save_every", "save_minutes", "keep", "threads", "merge", "track")}
NO_EFFECT |= {"run.strict_health", "run.strict_verdict", "engine.timeout_s", "engine.connect_s", "reward.timeout"}
NO_EFFECT |= {f"reward.judge.{key}" for key in ("key_env", "concurrency", "backoff_s", "cache")}


@dataclass(frozen=True, slots=True)
class Change:
    """A setting of a run that goes on which is not what it was."""

    key: str
    before: Any
    now: Any

    @property
    def is_refused(self) -> bool:
        return self.key not in FROM_HERE_ON and self.key not in NO_EFFECT and self.key not in DATA  # see Provenance

    def __str__(self) -> str:
        return visible(f"{self.key}={str(self.now)[:100]} (it has {str(self.before)[:100]})")


def changes(folder: Path, config: Config) -> list[Change]:
    """Return what is not as in the run that the folder holds, if that has saved something."""
    return differences(folder, config) if has_saved(folder) else []


def differences(folder: Path, config: Config) -> list[Change]:
    """Return what is not as in the settings that the folder holds, if it holds any."""
    before = settings_of(folder)
    return between(folder, before, config) if before else []


def between(folder: Path, *configs: Config) -> list[Change]:
    """Return what the second of two settings has changed. A copy of a file is the same as the original."""
    before, now = (flat(stored(config.model_dump(mode="json"), folder)) for config in configs)
    changed = [Change(key, before[key], now[key]) for key in now if before[key] != now[key]]
    return [one for one in changed if not _is_copied(one, folder)]


def data_files(source: Path) -> list[Path]:
    """Return the local file, or the files of a folder, that a setting of the data names."""
    return sorted(file for end in ("train.*", "test.*") for file in source.glob(end)) or [source] * source.is_file()


def _is_copied(change: Change, folder: Path) -> bool:
    """Return True if a change names copies of files, or the same names elsewhere (Provenance compares content)."""
    before, now = (value if isinstance(value, list) else [str(value)] for value in (change.before, change.now))
    if change.key not in PATHS or [Path(text).name for text in before] != [Path(text).name for text in now]:
        return False
    old, new = ([folder.absolute() / file_of(text) for text in texts] for texts in (before, now))
    own_copies = (folder / CODE).absolute()  # of code that is no longer where it was
    if not any(path.exists() for path in old if path.parent != own_copies):
        return all(path.exists() for path in new)
    pairs = [[file for path in paths for file in data_files(path)] for paths in (old, new)]
    return len(pairs[0]) == len(pairs[1]) > 0 and all(filecmp.cmp(*pair) for pair in zip(*pairs, strict=True))


def meaning(found: Sequence[Change]) -> list[str]:
    """Return a line for each changed setting, those with an effect first, but for the folder: runs may move."""
    effects = [f"  {one}: {FROM_HERE_ON[one.key]}" for one in found if one.key in FROM_HERE_ON]
    none = [f"  {one}: no effect on the result" for one in found if one.key in NO_EFFECT - {"run.dir"}]
    return [*effects, *none]


def refuse_other_settings(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder holds a run with other settings on which its steps depend."""
    found = changes(folder, config)
    if refused := [one for one in found if one.is_refused]:
        others = meaning(found)
        beside = "\n".join(["\nThe other changes would be possible:", *others] if others else [])
        back = ", ".join(visible(f"{one.key}: {written(one.before)}") for one in refused)
        reason = f"it holds a run with other settings: {', '.join(map(str, refused))}. Its steps depend on them"
        raise ConfigError(f"run.dir={folder}", reason, f"Go back to {back}, or choose another folder.{beside}")


def refuse_to_lengthen(folder: Path, config: Config) -> None:
    """Raise ConfigError if the run in the folder has ended, and these settings would go on and replace its result."""
    longer = [one for one in changes(folder, config) if FROM_HERE_ON.get(one.key) == LENGTH]
    if longer and (folder / VERDICT).is_file():
        settings = " ".join(f"{one.key}={written(one.now)}" for one in longer if one.now is not None)
        reason = f"its run has ended, and its result would be replaced: {', '.join(map(str, longer))}"
        remedy = f"Write --resume {folder} {settings} to go on with it, or choose another folder"
        raise ConfigError(f"run.dir={folder}", reason, remedy)


def settings_of(folder: Path) -> Config | None:
    """Return the settings of the newest checkpoint, or of config.yaml; newer settings have their defaults."""
    return saved_settings(folder) or written_settings(folder)


def saved_settings(folder: Path) -> Config | None:
    """Return the settings in the newest checkpoint whose state is not damaged, None if there is none."""
    for checkpoint in checkpoints(folder)[::-1]:
        path = checkpoint / "state.json"
        sums, wrong = manifest.read(checkpoint, path)
        if not wrong and manifest.checksum(path) == sums.get(path.name):
            try:
                return validated(placed(json.loads(path.read_bytes())["origin"]["settings"], folder))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                reason = f"it has no settings of this version of Octet ({visible(str(error))[:200]})"
                remedy = f"Go on with the version that wrote it, or delete {folder} to begin anew"
                raise CheckpointError(path, reason, remedy) from None
    return None


def written_settings(folder: Path) -> Config | None:
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    try:
        return resolve(str(path))
    except (OSError, OctetError) as error:
        remedy = "Restore the file, or delete it: the run then goes on with the settings of this command"
        raise ConfigError(path, f"the settings of this run cannot be read ({error})", remedy) from None


def refuse_what_is_not_its_own(folder: Path) -> None:
    """Raise ConfigError for a pipe, which would block the run, or a link, which would lead its writing elsewhere."""
    for path in folder.iterdir() if folder.is_dir() else ():
        is_file, mode = bool(FILES.fullmatch(path.name)), path.lstat().st_mode
        if (is_file and not stat.S_ISREG(mode)) or (FOLDERS.fullmatch(path.name) and not stat.S_ISDIR(mode)):
            reason = (
                f"a run has a {('file' if is_file else 'folder')} of its own where {path} is a "
                f"{KINDS.get(stat.S_IFMT(mode), 'device')}"
            )
            raise ConfigError(f"run.dir={folder}", reason, "Move it away, or choose another folder")


def checkpoints(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints of a run, the newest last."""
    found = [one for one in _listed(folder / "checkpoints") if one.is_dir(follow_symlinks=False)]
    steps = sorted((int(step[1]), one.path) for one in found if (step := CHECKPOINT.fullmatch(one.name)))
    return [Path(path) for _, path in steps]


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        reason = f"it cannot be read ({error.strerror}), so what the run has saved is not known"
        raise CheckpointError(folder, reason, f"Give this user access: chmod u+rwx {folder}") from None


def has_saved(folder: Path) -> bool:
    """True if a run has saved a checkpoint, or has exported its result."""
    saved = (one for one in _listed(folder / "checkpoints") if not one.name.endswith(".partial"))
    return any(saved) or any((folder / product).exists() for product in ("adapter", "model"))


def lost_steps(folder: Path) -> int:
    """Return how many steps a run has made that ended before it had saved anything."""
    metrics = folder / "metrics.jsonl"
    if has_saved(folder) or not metrics.is_file():
        return 0
    return sum(b'{"step": 0,' not in line for line in metrics.read_bytes().splitlines())
