"""Check that the model and the data are available, in seconds, before anything heavy is imported."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.config.settings import Config, TaskSettings
from trainer.errors import DataError
from trainer.model.hub import FETCH, Found, Refused, Unreachable, _home, _stay_offline, find_model, listing
from trainer.problem.sources import HubSet
from trainer.problem.task import hub_sets


def check(config: Config) -> Found:
    """Find the model. Raise ModelError or DataError if it or the data is neither on this machine nor on the hub."""
    found = find_model(config.model)
    for data in hub_sets(config.task):
        find_data(data, config.task)
    return found


def find_data(data: HubSet, task: TaskSettings) -> bool:
    """Return True if the data is in the cache, False if the hub has it. Raise DataError if neither has."""
    cached = is_prepared(data)
    try:
        listing("datasets", data.name, "main")
    except Refused as refusal:
        if not cached:
            raise DataError(
                f"task.name={task.name}: the hub does not give {data.name} ({refusal}). Check the spelling, and log in "
                "with `hf auth login` if it is private or gated, or write task.data_dir=FOLDER."
            ) from None
    except Unreachable as reason:
        if not cached:
            raise DataError(
                f"task.name={task.name}: {data} is not in the cache ({data_cache()}), and {reason}. "
                f"Write task.data_dir=FOLDER with train.jsonl and test.jsonl. {FETCH}"
            ) from None
        _stay_offline(reason)
    return cached


def data_cache() -> Path:
    return Path(os.environ.get("HF_DATASETS_CACHE", _home() / "datasets"))


def is_prepared(data: HubSet) -> bool:
    """Return True if `datasets` can read this split from its cache, without the hub."""
    split = data.split.partition("[")[0]
    folders = [folder for folder in data_cache().glob("*___*") if _letters(folder.name) == _letters(data.name)]
    return any(file for folder in folders for file in folder.rglob(f"*-{split}*.arrow"))


def _letters(name: str) -> str:
    """Return a name that compares with the folders of `datasets`, which writes MyData as my_data, a/b as a___b."""
    return name.replace("/", "").replace("_", "").casefold()
