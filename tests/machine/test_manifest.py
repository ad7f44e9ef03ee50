"""The checksums of what Octet writes, and who asks for them."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import refuses
from trainer.errors import CheckpointError
from trainer.machine import manifest


@pytest.fixture
def adapter(tmp_path) -> Path:
    with manifest.replacing(tmp_path / "adapter", "it", "Make room.") as folder:
        (folder / "inside").mkdir(parents=True)
        for name in ("adapter_model.safetensors", "adapter_config.json", "README.md", "inside/x.jinja"):
            (folder / name).write_text(name)
    assert not folder.exists()
    return tmp_path / "adapter"


WAYS = {
    "flipped": (lambda path: path.write_text("Adapter_config.json"), "adapter_config.json is not what was saved"),
    "empty": (lambda path: path.write_text(""), "adapter_config.json is not what was saved"),
    "gone": (lambda path: path.unlink(), "adapter_config.json is missing"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "adapter_config.json is missing"),
    "deeper": (lambda path: (path.parent / "inside/x.jinja").write_text(""), "inside/x.jinja is not what was saved"),
    "its manifest": (lambda path: (path.parent / "manifest.json").write_text("{"), "manifest.json cannot be read"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_adapter_is_named(adapter, way):
    manifest.must_be_whole(adapter)
    change, told = WAYS[way]
    change(adapter / "adapter_config.json")
    with refuses(adapter, CheckpointError, names=told):
        manifest.must_be_whole(adapter)


def test_an_adapter_may_have_another_readme_or_be_of_another_trainer(adapter):
    (adapter / "README.md").write_text("mine")
    manifest.must_be_whole(adapter)
    (adapter / "manifest.json").unlink()
    (adapter / "adapter_config.json").write_text("{}")
    manifest.must_be_whole(adapter)


def test_the_adapter_of_a_checkpoint_is_in_the_manifest_of_the_checkpoint(adapter):
    checkpoint = Path(shutil.copytree(adapter, adapter.parent / "step_000002/adapter")).parent
    (checkpoint / "adapter/manifest.json").unlink()
    (checkpoint / "engine").write_text("")
    manifest.write(checkpoint, {name: manifest.checksum(checkpoint / name) for name in manifest.files(checkpoint)})
    (checkpoint / "engine").unlink()  # what is not needed of it may be gone
    manifest.must_be_whole(checkpoint / "adapter")
    (checkpoint / "adapter/adapter_config.json").write_text("{}")
    with refuses(checkpoint / "adapter", CheckpointError, names="adapter/adapter_config.json"):
        manifest.must_be_whole(checkpoint / "adapter")


def test_a_result_takes_the_place_of_an_earlier_one_and_leaves_what_lies_beside_it(adapter):
    (adapter / "mine").write_text("x")
    with manifest.replacing(adapter, "it", "Make room.") as folder:
        folder.mkdir()
        (folder / "adapter_config.json").write_text("new")
    assert ((adapter / "adapter_config.json").read_text(), (adapter / "mine").read_text()) == ("new", "x")
    manifest.must_be_whole(adapter)


def test_a_folder_that_is_written_twice_is_whole(tmp_path):
    """As a model is that was merged into the same folder again."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):
        manifest.seal(tmp_path)
    manifest.must_be_whole(tmp_path)
