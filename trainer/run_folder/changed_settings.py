"""The settings of an earlier run in a folder, and which of them may change if it is resumed. Does not import torch."""

import filecmp
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.paths import CODE, DATA, PATHS, data_files, file_of, placed, stored
from trainer.config.read_yaml import written
from trainer.config.request import OF_A_WARMUP
from trainer.config.resolve import flat, resolve, validated
from trainer.config.settings import Config, Vllm
from trainer.errors import CheckpointError, ConfigError, OctetError
from trainer.machine import manifest
from trainer.machine.safe_text import visible
from trainer.run_folder.journal import VERDICT
from trainer.run_folder.layout import checkpoints, has_saved

# Settings that may change when a run is resumed, because no completed step depends on them, and the effect of a change
# on the remaining steps.
LENGTH = "the schedule of the learning rate changes too; a new run from the result would have a schedule of its own"
BUDGET = "answers may get a grade that would have had none, or the other way round"
SERVER = "the sampler may round in another way; the policy is the same"
FROM_HERE_ON = {
    "run.steps": LENGTH,
    "run.epochs": LENGTH,
    "eval.problems": "accuracies before and after it are not compared, so the best and the patience start again",
    "eval.every": "the best is chosen among other steps",
    "eval.metric": "the best is chosen by it",
    "eval.patience": "the run may end after another step",
    "eval.samples": "the base is evaluated again",
    "rollout.turns.seconds": "environments and agents have more or less time",
    "optim.tokens_per_micro_batch": "sums are rounded in another way",
} | {f"rollout.vllm.{key}": SERVER for key in Vllm.model_fields}
FROM_HERE_ON |= {f"reward.judge.{key}": BUDGET for key in ("timeout_s", "retries", "max_requests", "max_tokens")}
FROM_HERE_ON |= {own: FROM_HERE_ON[key] for key, own in OF_A_WARMUP.items() if key in FROM_HERE_ON}
NO_EFFECT = {f"run.{key}" for key in ("dir", "save_every", "save_minutes", "keep", "threads", "merge", "track")}
NO_EFFECT |= {"run.strict_health", "run.strict_verdict", "engine.timeout_s", "engine.connect_s", "reward.timeout"}
NO_EFFECT |= {"run.track_answers"} | {f"reward.judge.{key}" for key in ("key_env", "concurrency", "backoff_s", "cache")}
MAY_CHANGE = {*FROM_HERE_ON, *NO_EFFECT, *DATA}  # Provenance compares the data themselves


class Change(NamedTuple):
    """A setting that differs: from that of the run that is resumed, or from that of a preset."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return visible(f"{self.key}={written(self.now)[:100]} (it has {written(self.before)[:100]})")


def changes(folder: Path, config: Config) -> list[Change]:
    """Return the changes from the run in the folder, if it has saved something."""
    return differences(folder, config) if has_saved(folder) else []


def differences(folder: Path, config: Config) -> list[Change]:
    """Return the changes from the settings in the folder, if there are any. A copy of a file counts as the original."""
    if not (saved := settings_of(folder)):
        return []
    before, now = (flat(stored(one.model_dump(mode="json"), folder)) for one in (saved, config))
    before |= {key: now[key] for key in OF_A_WARMUP if config.is_warmup}  # which are equal to its own
    changed = [Change(key, before[key], now[key]) for key in now if before[key] != now[key]]
    return [change for change in changed if not _is_copied(change, folder)]


def _is_copied(change: Change, folder: Path) -> bool:
    """Return True if a change names copies of files, or equal names elsewhere, whose content Provenance compares."""
    before, now = (value if isinstance(value, list) else [str(value)] for value in (change.before, change.now))
    if change.key not in PATHS or [Path(text).name for text in before] != [Path(text).name for text in now]:
        return False
    others = [pair for pair in zip(before, now, strict=True) if pair[0] != pair[1]]
    old, new = ([folder.absolute() / file_of(text) for text in texts] for texts in zip(*others, strict=True))
    own_copies = (folder / CODE).absolute()  # of code that is no longer at its old place
    if not any(path.exists() for path in old if path.parent != own_copies):
        return all(path.exists() for path in new)
    pairs = [[file for path in paths for file in data_files(path)] for paths in (old, new)]
    return len(pairs[0]) == len(pairs[1]) > 0 and all(filecmp.cmp(*pair) for pair in zip(*pairs, strict=True))


def meaning(changes: Sequence[Change]) -> list[str]:
    """Return a line for each changed setting except run.dir, those with an effect first."""
    effects = [f"  {one}: {FROM_HERE_ON[one.key]}" for one in changes if one.key in FROM_HERE_ON]
    none = [f"  {one}: no effect on the result" for one in changes if one.key in NO_EFFECT - {"run.dir"}]
    return [*effects, *none]


def refuse_other_settings(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder holds a run, or a warm-up, with other settings on which its steps depend."""
    if config.warmup.steps and not config.is_warmup:
        warmup = folder / "warmup"
        refuse_other_settings(warmup, config.warmed_up_in(warmup))
        config = config.after_warmup(warmup)
    may_change = MAY_CHANGE - (set() if is_warmup_alone(folder, config) else {*OF_A_WARMUP.values()})
    changed = changes(folder, config)
    if refused := [one for one in changed if one.key not in may_change]:
        others = meaning([one for one in changed if one.key in may_change])
        possible = "\n".join(["\nThe other changes would be possible:", *others] if others else [])
        before = ", ".join(visible(f"{one.key}: {written(one.before)}") for one in refused)
        reason = f"it holds a run with other settings: {', '.join(map(str, refused))}. Its steps depend on them"
        raise ConfigError(f"run.dir={folder}", reason, f"Go back to {before}, or choose another folder.{possible}")


def is_warmup_alone(folder: Path, config: Config) -> bool:
    """Return True if more steps would leave those that are done as they were: rounds share the steps among them."""
    return config.is_warmup and config.warmup.rounds == 1 and not (folder.parent / "config.yaml").is_file()


def refuse_to_lengthen(folder: Path, config: Config) -> None:
    """Raise ConfigError if the run in the folder has ended, and these settings would lengthen it."""
    longer = [one for one in changes(folder, config) if FROM_HERE_ON.get(one.key) == LENGTH]
    if longer and (folder / VERDICT).is_file():
        settings = " ".join(f"{one.key}={written(one.now)}" for one in longer if one.now is not None)
        reason = f"its run has ended, and its result would be replaced: {', '.join(map(str, longer))}"
        remedy = f"`octet train --resume {shlex.quote(str(folder))} {settings}` continues it; or choose another folder"
        raise ConfigError(f"run.dir={folder}", reason, remedy)


def settings_of(folder: Path) -> Config | None:
    """Return the settings in the newest checkpoint, or in config.yaml. Settings added since have their defaults."""
    if saved := _saved_settings(folder):
        return saved
    path = folder / "config.yaml"
    try:
        return resolve(str(path)) if path.is_file() else None
    except (OSError, OctetError) as error:
        reason = str(error).removesuffix(f" {getattr(error, 'remedy', '')}.")
        remedy = "Restore the file, or delete it: the run then continues with the settings of this command"
        raise ConfigError(path, f"the settings of this run cannot be read ({reason})", remedy) from None


def _saved_settings(folder: Path) -> Config | None:
    """Return the settings in the newest checkpoint whose state is not damaged, or None if there is none."""
    for checkpoint in checkpoints(folder)[::-1]:
        path = checkpoint / "state.json"
        sums, wrong = manifest.read(checkpoint, path)
        if not wrong and manifest.checksum(path) == sums.get(path.name):
            try:
                return validated(placed(json.loads(path.read_bytes())["origin"]["settings"], folder))
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                reason = f"it has no settings of this version of Octet ({visible(str(error))[:200]})"
                remedy = f"Continue with the version that wrote it, or delete {folder} to start again"
                raise CheckpointError(path, reason, remedy) from None
    return None
