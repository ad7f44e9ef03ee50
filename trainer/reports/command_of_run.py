"""The preset that is nearest to a run, the settings that differ from it, and the command that repeats the run."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from trainer.config.read_yaml import written as yaml_of
from trainer.config.resolve import flat, resolve
from trainer.config.train_options import PRESETS, names_in
from trainer.machine.safe_text import as_command
from trainer.run_folder.changed_settings import Change

REVISION = r"[0-9A-Za-z][0-9A-Za-z._/-]*"  # as `git describe` writes it; no character is special in a shell


def nearest_preset(settings: Mapping[str, Any]) -> tuple[str, list[Change]]:
    """Return the preset with the fewest changes, because a run does not store the name of its preset."""
    return min(((name, changes(settings, name)) for name in names_in(PRESETS)), key=lambda pair: len(pair[1]))


def commands(settings: Mapping[str, Any], made_with: Sequence[str]) -> list[str]:
    """Return the lines that repeat a run: its revision, if it is known, and the command."""
    revision = made_with[0].rpartition(", ")[2].removeprefix("git revision ") if made_with else ""
    changed = ", and changes that were not committed" if revision.endswith("-dirty") else ""
    checkout = f"git checkout {revision.removesuffix('-dirty')}   # in a clone of Octet{changed}"
    preset, changes = nearest_preset(settings)
    command = as_command(["octet", "train", "--preset", preset, *written(changes)])
    return [*([checkout] if re.fullmatch(REVISION, revision) else []), command]


def written(changes: Sequence[Change]) -> list[str]:
    """Return settings as they are written on a command line, a list of one function without brackets."""
    values = {one.key: one.now[0] if one.key == "reward.custom" and len(one.now) == 1 else one.now for one in changes}
    if not values.get("reward.weights", True):  # none beside functions, as reward.custom alone says
        del values["reward.weights"]
    return [f"{key}={yaml_of(value)}" for key, value in values.items()]


# What a function alone sets, whatever the preset has; a command names others.
BESIDE_FUNCTIONS = {"reward.weights": {}, "rollout.dead_by": "reward"}


@cache
def _preset(name: str) -> Mapping[str, Any]:
    return flat(resolve(name).model_dump(mode="json"))


def changes(settings: Mapping[str, Any], preset: str) -> list[Change]:
    usual = _preset(preset)
    pairs = ((key, usual[key], value) for key, value in settings.items() if key != "run.dir")
    alone = BESIDE_FUNCTIONS if settings["reward.custom"] else {}
    return [Change(key, before, now) for key, before, now in pairs if now != alone.get(key, before)]
