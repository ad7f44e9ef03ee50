"""What an earlier run has left in a run folder: its settings, and whether a run can go on from it. No torch."""

from __future__ import annotations

from pathlib import Path

from trainer.config.command_line import flat, resolve
from trainer.config.settings import Config, Vllm
from trainer.errors import ConfigError, OctetError

# Settings that may change when a run is resumed, because no step that is done depends on them. Another number of steps
# changes the schedule of the remaining ones.
FREE_TO_CHANGE = {"run.dir", "run.steps", "run.epochs", "run.save_every", "run.keep", "run.threads", "run.merge"}
FREE_TO_CHANGE |= {"run.strict_health", "run.strict_verdict", "run.track"}
FREE_TO_CHANGE |= {
    "eval.problems",
    "eval.every",
    "eval.metric",
    "eval.patience",
    "engine.timeout_s",
    "engine.connect_s",
}
FREE_TO_CHANGE |= {f"reward.judge.{key}" for key in ("key_env", "concurrency", "timeout_s", "retries", "backoff_s")}
FREE_TO_CHANGE |= {"reward.judge.max_requests", "reward.judge.max_tokens", "reward.judge.cache", "reward.timeout"}
FREE_TO_CHANGE |= {f"rollout.vllm.{key}" for key in Vllm.model_fields}  # the policy that samples stays the same


def refuse_other_settings(folder: Path, config: Config) -> None:
    """Raise ConfigError if the folder holds a run with other settings that has saved something."""
    stored = settings_of(folder) if has_saved(folder) else None
    if stored is None:
        return
    before, now = flat(stored.model_dump(mode="json")), flat(config.model_dump(mode="json"))
    changed = [key for key in now if before.get(key) != now[key] and key not in FREE_TO_CHANGE]
    if changed:
        what = ", ".join(f"{key}={now[key]} (it has {before.get(key)})" for key in changed)
        raise ConfigError(f"run.dir={folder}: it holds a run with other settings: {what}. Choose another folder.")


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
