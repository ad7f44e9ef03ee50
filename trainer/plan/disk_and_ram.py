"""The least disk space and RAM that a run needs, by arithmetic on the files of its model. No torch is imported.

With less than these lower bounds a run must fail, so it is refused before it begins.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from trainer.config import ds_config
from trainer.config.settings import Config
from trainer.machine.hardware import Hardware, ranks
from trainer.model.hub import NOTHING, Found
from trainer.model.shapes import UnknownFamily, known_shape
from trainer.plan.planner import PROCESS, Planner

# For each trained number: its fp32 copy and two moments, in a checkpoint, and in CPU memory if they are offloaded.
STATE_BYTES = {"adamw": 12, "adamw_8bit": 6}
# Two thirds of what a plan counts for a process: a plan has to be enough, and a refusal has to be certain.
PROCESS_BYTES = PROCESS * 2 // 3


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes."""

    download: int  # in the cache of the hub
    run: int  # in the run folder: checkpoints and the result
    ram: int


def of(config: Config, found: Found, machine: Hardware, teacher: Found = NOTHING) -> Needs:
    """Return the needs of all ranks on this machine, whose cards are those that the policy is trained on."""
    is_adapter, dtype = config.lora.enabled, config.model.dtype
    numbers = _numbers(found)
    width = 4 if dtype == "fp32" or (dtype == "auto" and not machine.gpus) else 2
    loaded = [numbers * (width if config.model.quantize == "none" else 1)]
    loaded.append(_numbers(teacher) * (width if config.teacher.quantize == "none" else 1))
    trained = _trained_by_adapter(config) if is_adapter else numbers
    state = STATE_BYTES[config.optim.name]
    checkpoint = trained * (state + width * (2 if is_adapter else 1))  # an adapter is also saved for other programs
    is_offloaded = ds_config.is_offloaded(ds_config.zero_settings(config), "optimizer")
    results = config.merges or not is_adapter
    return Needs(
        download=found.download + (teacher.download if config.teacher.name != config.model.name else 0),
        run=(config.run.keep + 1) * checkpoint + numbers * width * results,
        # on a card, one of them has left the RAM when the other is loaded
        ram=ranks(machine)[1] * (PROCESS_BYTES + (max(loaded) if machine.gpus else sum(loaded)))
        + trained * state * is_offloaded,
    )


def _numbers(found: Found) -> int:
    return found.weights // (4 if _stored_dtype(found) == "float32" else 2)


def _stored_dtype(found: Found) -> str | None:
    """Return the dtype that the model's config.json names; None while it is still on the hub."""
    stored = json.loads((found.folder / "config.json").read_text()) if found.folder else {}
    return stored.get("dtype") or stored.get("torch_dtype")


def _trained_by_adapter(config: Config) -> int:
    """Return how many numbers an adapter has; 0 for a model whose shape is not known here."""
    try:
        shape = known_shape(config.model.name, config.model.revision)
    except UnknownFamily:
        return 0
    return Planner(shape, config, world_size=1, vram=0).trained if shape else 0


# ---------------------------------------------------------------- what is there


def free_disk(folder: Path) -> int:
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    folder = folder.expanduser().absolute()
    return folder if folder.is_dir() else existing(folder.parent)
