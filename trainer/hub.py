"""Can the model and the data be had? Asked before anything heavy is imported, so that the answer takes seconds."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from pathlib import Path

from trainer.config import Config
from trainer.errors import DataError, ModelError
from trainer.tasks.base import hub_sets


def check(config: Config) -> None:
    """An error for a model or data set that is neither here nor in the cache, when the hub cannot be reached."""
    name = config.model.name
    if name != "nano" and not _is_local(name) and not _can_download("models", name):
        raise ModelError(
            f"model.name={name}: it is neither a folder nor in the cache ({_cache()}), and the hub cannot be reached. "
            "Connect to the internet, write the path of a local folder, or try --preset nano, which needs no download."
        )
    for data in hub_sets(config.task):
        if not _can_download("datasets", data.name):
            raise DataError(
                f"task.name={config.task.name}: {data.name} is not in the cache ({_cache()}), and the hub cannot be "
                "reached. Connect to the internet, or write task.data_dir=FOLDER with train.jsonl and test.jsonl."
            )


def _is_local(name: str) -> bool:
    folder = Path(name).expanduser()
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(f"model.name={name}: there is no config.json in this folder, so it is not a model.")
    return folder.is_dir()


def _cache() -> Path:
    home = Path(os.environ.get("HF_HOME", Path("~/.cache/huggingface").expanduser()))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub"))


def _can_download(kind: str, name: str) -> bool:
    cached = _cache() / f"{kind}--{name.replace('/', '--')}" / "snapshots"
    return cached.is_dir() or (os.environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and _hub_answers())


def _hub_answers() -> bool:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=5).close()
    except urllib.error.HTTPError:  # it is there, even if it does not like the question
        return True
    except (OSError, ValueError):
        return False
    return True
