"""The names of metrics in TensorBoard, wandb and trackio, and a run that is tracked by one of the latter two."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from secrets import token_hex
from typing import Any

from trainer.machine.visible import without_keys

ID = "tracked_run"  # the file in a run folder with the identity of the run, by which a resumed run is found
LOGIN_S, FINISH_S = 60.0, 60.0  # how long wandb may wait for a login, and for its uploads at the end

# TRL's names for quantities that Octet defines as TRL does, so that runs of both share a chart. docs/metrics.md has the
# others.
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
EXTREMES = ("reward/min", "reward/max")  # of whole rewards, so these are no parts of it; TRL does not measure them


def tracked_name(name: str) -> str:
    """Return the name of a metric in trackers: TRL's, with the `train/` that transformers adds, or else Octet's own."""
    if name in TRL:
        return f"train/{TRL[name]}"
    if name.startswith("reward/") and name not in EXTREMES:
        return f"train/rewards/{name.removeprefix('reward/')}/mean"
    return name


class Tracker:
    """Sends metrics to wandb or trackio. If that fails, it warns once and stops; the run goes on."""

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
        except Exception as error:  # noqa: BLE001  whatever it is, the run matters more
            self._module = None
            said = f"{type(error).__name__}: {without_keys(' '.join(str(error).split()), 200)}"
            remedy = f" pip install {self._library} installs it." if isinstance(error, ImportError) else ""
            self._warn(
                f"warning: run.track={self._library} failed ({said}), so the run goes on without it.{remedy} "
                "metrics.jsonl has all metrics."
            )


def _wandb(folder: Path, identity: str, settings: dict[str, Any]) -> Any:
    import wandb

    # its console would copy what is printed, and disturb the screen
    quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
    options = wandb.Settings(**quiet, login_timeout=LOGIN_S, finish_timeout=FINISH_S)
    name, project = folder.resolve().name, os.environ.get("WANDB_PROJECT", "octet")
    run: dict[str, Any] = {"project": project, "id": identity, "name": name, "dir": folder}
    wandb.init(**run, config=settings, resume="allow", settings=options)
    return wandb


def _trackio(folder: Path, identity: str, settings: dict[str, Any]) -> Any:
    import trackio

    name, project = f"{folder.resolve().name}-{identity}", os.environ.get("TRACKIO_PROJECT", "octet")
    hardware = {"auto_log_cpu": False, "auto_log_gpu": False}
    trackio.init(project=project, name=name, config=settings, resume="allow", embed=False, **hardware)
    return trackio  # whose finish() is the one that leaves nothing to do, or to print, when Python ends
