"""The checks that every run makes before anything heavy is imported."""

from __future__ import annotations

from trainer.config import ds_config
from trainer.config.settings import Config
from trainer.machine import hardware
from trainer.plan import memory_check, preflight
from trainer.reward import make


def check(config: Config, machine: hardware.Hardware) -> None:
    """Raise an error if a run with these settings cannot start on this machine."""
    ds_config.check(config, has_gpu=bool(machine.gpus))
    memory_check.check(config, machine)
    make.check(config)
    preflight.check(config, machine)
