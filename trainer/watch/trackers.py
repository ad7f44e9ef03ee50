"""The names of metrics in TensorBoard, wandb and trackio, and the connection to one of the latter two."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from secrets import token_hex
from typing import Any

from trainer.config.settings import RUNS
from trainer.machine.safe_text import without_keys

ID = "tracked_run"  # the file in a run folder with the run's identity, which a resumed run continues
LOGIN_S, FINISH_S = 60.0, 60.0  # how long wandb may wait for a login, and for its uploads at the end

# TRL's names for metrics that both define in the same way, so that their runs share a chart. The other metrics are in
# docs/metrics.md.
TRL = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "dead_groups": "frac_reward_zero_std",
    "length": "completions/mean_length",
    "truncated": "completions/clipped_ratio",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "clipped/low": "clip_ratio/low_mean",
    "clipped/high": "clip_ratio/high_mean",
    "grad_norm": "grad_norm",
    "lr": "learning_rate",
    "sampler_difference": "sampling/sampling_logp_difference/mean",
    "sampler_difference/max": "sampling/sampling_logp_difference/max",
}
EXTREMES = ("reward/min", "reward/max")  # not parts of the reward; TRL does not measure them


def tracked_name(name: str) -> str:
    """Return the name of a metric in trackers: TRL's, with the `train/` that transformers adds, or else Octet's own."""
    if name in TRL:
        return f"train/{TRL[name]}"
    if name.startswith("reward/") and name not in EXTREMES:
        return f"train/rewards/{name.removeprefix('reward/')}/mean"
    return name


class Tracker:
    """Sends metrics to wandb or trackio. If that fails, it warns once and sends no more; the run continues."""

    def __init__(self, library: str, folder: Path, settings: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._library = library
        self._warn = warn
        self._module: Any = None
        with self._surviving():
            if not (file := folder / ID).is_file():
                file.write_text(token_hex(4))
            start = {"wandb": _wandb, "trackio": _trackio}[library]
            self._module = start(folder, file.read_text().strip(), dict(settings))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._module is not None:
            with self._surviving():
                self._module.log(dict(metrics), step=step)

    def answers(self, step: int, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Send a table of answers."""
        if self._module is not None:
            with self._surviving():
                self._module.log({"answers": self._module.Table(columns=columns, data=rows)}, step=step)

    def close(self) -> None:
        if self._module is not None:
            with self._surviving():
                self._module.finish()
        self._module = None

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr):  # standard output may be JSON
                yield
        except Exception as error:  # noqa: BLE001  no failure of a tracker is worth a run
            self._module = None
            reason = f"{type(error).__name__}: {without_keys(' '.join(str(error).split()), 200)}"
            remedy = f" pip install {self._library} installs it." if isinstance(error, ImportError) else ""
            self._warn(
                f"warning: run.track={self._library} failed ({reason}), so the run continues without it.{remedy} "
                "metrics.jsonl has all metrics."
            )


def group_of(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Return the group of a run: `STUDY/ARM` for the seeds of an arm, the folder of a sweep, or none."""
    folder = folder.resolve()
    arm = folder.name.removesuffix(f"-{settings.get('run.seed')}")
    if arm != folder.name and folder.parent.name != RUNS.name:  # `runs/demo-0` is a run by itself
        return f"{folder.parent.name}/{arm}"
    return folder.parent.name if (folder.parent / "job.sbatch").is_file() else None


def _wandb(folder: Path, identity: str, settings: dict[str, Any]) -> Any:
    import wandb

    # wandb's console would copy printed text and disturb the screen
    quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
    options = wandb.Settings(**quiet, login_timeout=LOGIN_S, finish_timeout=FINISH_S)
    name, project = folder.resolve().name, os.environ.get("WANDB_PROJECT", "octet")
    run: dict[str, Any] = {"project": project, "id": identity, "name": name, "dir": folder}
    run["group"] = group_of(folder, settings)
    wandb.init(**run, config=settings, resume="allow", settings=options)
    return wandb


def _trackio(folder: Path, identity: str, settings: dict[str, Any]) -> Any:
    import trackio

    name, project = f"{folder.resolve().name}-{identity}", os.environ.get("TRACKIO_PROJECT", "octet")
    options = {"auto_log_cpu": False, "auto_log_gpu": False, "group": group_of(folder, settings)}
    trackio.init(project=project, name=name, config=settings, resume="allow", embed=False, **options)
    return trackio  # its finish() leaves nothing to do or to print when Python exits
