"""ZeRO-3 for tiny models."""

import json

import pytest

from trainer.config import ds_config


@pytest.fixture(scope="module")
def splits(tmp_path_factory) -> dict[str, str]:
    """ZeRO-3 as shipped, and without DeepSpeed's threshold: it splits no tensor of fewer than 100,000 numbers, and so
    nothing of a tiny model."""
    found = {"shipped": "zero3"}
    for name in ("zero3", "zero3_offload"):
        settings = ds_config.read(name)
        settings["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        path = tmp_path_factory.mktemp("ds") / f"{name}.json"
        path.write_text(json.dumps(settings))
        found[name] = str(path)
    return found


@pytest.fixture(scope="module")
def split(splits) -> str:
    return splits["zero3_offload"]
