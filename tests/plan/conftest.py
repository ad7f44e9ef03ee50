"""ZeRO-3 for tiny models."""

import json
from pathlib import Path

import pytest

from trainer.config import ds_config


def without_threshold(name: str, path: Path) -> str:
    """A shipped configuration without DeepSpeed's threshold: it splits no tensor of fewer than 100,000 numbers, and so
    nothing of a tiny model."""
    settings = ds_config.read(name)
    settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> dict[str, str]:
    """ZeRO-3 as shipped, and without the threshold."""
    folder, names = tmp_path_factory.mktemp("ds"), ("zero3", "zero3_offload")
    return {"shipped": "zero3"} | {name: without_threshold(name, folder / f"{name}.json") for name in names}


@pytest.fixture(scope="module")
def split(splits) -> str:
    return splits["zero3_offload"]
