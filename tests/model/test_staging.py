"""The model on a disk of the node: copied once, whole or not at all, and its name stays what it is."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from trainer.config.settings import Lora, Model
from trainer.model import load
from trainer.model.load import load_model, load_tokenizer, location
from trainer.model.lora import add_adapter
from trainer.ranks import distributed
from trainer.ranks.watchdog import Ranks


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTET_SCRATCH", str(tmp_path / "disk"))
    return tmp_path / "disk"


@pytest.fixture
def model(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    return Model(name=str(tmp_path / "model"))


def test_it_is_copied_and_read_from_there(scratch, model, monkeypatch):
    """The adapter names the folder of its base so that PEFT finds it from everywhere, and not the copy: it would look
    for `./model` in another place, and for `models/mine` on the hub."""
    folder, model = Path(model.name), Model(name="model")
    monkeypatch.chdir(folder.parent)
    load.stage(model)
    (copy,) = scratch.glob("octet-models-*/model-*")
    assert location(model) == str(copy)
    assert {file.name for file in copy.iterdir()} == {file.name for file in folder.iterdir()}
    load_tokenizer(model)
    adapted = add_adapter(load_model(model, "fp32", torch.device("cpu")), Lora())
    assert adapted.peft_config["default"].base_model_name_or_path == str(folder)


def test_only_the_first_rank_of_a_node_copies_and_only_once(scratch, model, monkeypatch):
    monkeypatch.setattr(distributed._connection, "ranks", Ranks(None, mine=3, hosts=["a", "b", "a", "b"]))
    load.stage(model)
    assert location(model) == model.name
    monkeypatch.undo()
    monkeypatch.setenv("OCTET_SCRATCH", str(scratch))
    load.stage(model)
    before = (load.staged_copy(model) / "config.json").stat().st_ino
    load.stage(model)
    assert (load.staged_copy(model) / "config.json").stat().st_ino == before


def test_a_changed_model_is_another_copy(scratch, model, tmp_path):
    load.stage(model)
    (tmp_path / "model/config.json").write_text("{}")
    assert location(model) == model.name
    load.stage(model)
    assert len(list(scratch.glob("octet-models-*/*"))) == 2


def link(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.with_name("elsewhere")))


UNSAFE = {
    "others may write to it": lambda folder: folder.chmod(0o770),
    "a link": link,
    "another user's": lambda folder: os.chown(folder, 65534, 65534),
}


@pytest.mark.parametrize("what", UNSAFE)
@pytest.mark.parametrize("is_parent", [True, False])
def test_a_copy_that_another_user_can_have_made_is_not_used(scratch, model, monkeypatch, capsys, what, is_parent):
    if what == "another user's" and os.geteuid():
        pytest.skip("only root can give a folder away")
    load.stage(model)
    copy = load.staged_copy(model)
    UNSAFE[what](copy.parent if is_parent else copy)
    assert location(model) == model.name
    monkeypatch.setattr(shutil, "copytree", lambda *_: pytest.fail("it was copied"))
    load.stage(model)
    assert (location(model), capsys.readouterr().err.count("The original is read.")) == (model.name, 1)


@pytest.mark.parametrize("what", ["the disk cannot be written", "a file cannot be looked at"])
def test_a_disk_or_a_file_that_fails_is_no_error(scratch, model, tmp_path, capsys, what):
    if what == "the disk cannot be written":
        scratch.write_text("a file")
    else:
        (tmp_path / "model/gone").symlink_to(tmp_path / "nowhere")
    load.stage(model)
    assert "The original is read" in capsys.readouterr().err
    assert location(model) == model.name


def test_without_a_disk_and_for_the_embedded_model_nothing_happens(model, scratch, monkeypatch):
    load.stage(Model(name="nano"))
    monkeypatch.delenv("OCTET_SCRATCH")
    monkeypatch.setattr(load, "_source", lambda settings: pytest.fail("it was looked for"))
    load.stage(model)
    assert not scratch.exists()
    assert location(model) == model.name
