"""What an earlier run has left in a run folder: its settings, and whether a run can go on from it. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.command_line import flat, resolve
from trainer.config.settings import Config, Vllm
from trainer.errors import ConfigError, OctetError
from trainer.machine.visible import visible

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
NO_EFFECT = {f"run.{key}" for key in ("dir", "save_every", "keep", "threads", "merge", "track")}
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
        return self.key not in FROM_HERE_ON and self.key not in NO_EFFECT

    def __str__(self) -> str:
        return visible(f"{self.key}={str(self.now)[:100]} (it has {str(self.before)[:100]})")


def changes(folder: Path, config: Config) -> list[Change]:
    """Return what is not as in the run that the folder holds, if that has saved something."""
    return differences(folder, config) if has_saved(folder) else []


def differences(folder: Path, config: Config) -> list[Change]:
    """Return what is not as in the settings that the folder holds, if it holds any."""
    stored = settings_of(folder)
    if stored is None:
        return []
    before, now = flat(stored.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    return [Change(key, before[key], now[key]) for key in now if before[key] != now[key]]


def meaning(found: Sequence[Change]) -> list[str]:
    """Return a line for each setting that may change, those that have an effect first. The folder is not one of them:
    a run may be moved."""
    effects = [f"  {one}: {FROM_HERE_ON[one.key]}" for one in found if one.key in FROM_HERE_ON]
    none = [f"  {one}: no effect on the result" for one in found if one.key in NO_EFFECT - {"run.dir"}]
    return [*effects, *none]


def refuse_other_settings(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder holds a run with other settings on which its steps depend."""
    found = changes(folder, config)
    refused = [str(one) for one in found if one.is_refused]
    if refused:
        others = meaning(found)
        beside = "\nThe other changes would be possible:\n" + "\n".join(others) if others else ""
        raise ConfigError(
            f"run.dir={folder}: it holds a run with other settings: {', '.join(refused)}. The steps that it has made "
            f"depend on them. Write what it has, or choose another folder.{beside}"
        )


def settings_of(folder: Path) -> Config | None:
    """Return the settings that a run folder holds. One that is newer than the run has its default there."""
    path = folder / "config.yaml"
    if not path.is_file():
        return None
    try:
        return resolve(str(path))
    except (OSError, OctetError) as error:
        raise ConfigError(
            f"{path}: the settings of this run cannot be read ({error}). Restore the file, or delete it: the run then "
            "goes on with the settings of this command."
        ) from None


def has_saved(folder: Path) -> bool:
    """True if a run has saved a checkpoint, or has exported its result."""
    saved = (path for path in (folder / "checkpoints").glob("*") if path.suffix != ".partial")
    return any(saved) or any((folder / product).exists() for product in ("adapter", "model"))


def lost_steps(folder: Path) -> int:
    """Return how many steps a run has made that ended before it had saved anything."""
    metrics = folder / "metrics.jsonl"
    if has_saved(folder) or not metrics.is_file():
        return 0
    return sum(b'{"step": 0,' not in line for line in metrics.read_bytes().splitlines())
