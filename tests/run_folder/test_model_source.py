"""What a path on a command line stands for."""

from pathlib import Path

import pytest

from tests.commands.conftest import config_of, write
from trainer.config.settings import Model
from trainer.model import hub
from trainer.run_folder.model_source import Source


@pytest.fixture
def run(tmp_path) -> Path:
    """The files by which a run folder is known, its adapter, a checkpoint, and the merged model."""
    adapters = ("adapter", "checkpoints/step_000002/adapter", "other")
    names = ("merged/config.json", *(f"{place}/adapter_config.json" for place in adapters))
    files = {name: {"base_model_name_or_path": "you/base"} for name in names}
    return write(tmp_path / "it", files | {"config.yaml": config_of()})


SAVED = "checkpoints/step_000002/adapter"


@pytest.mark.parametrize(
    ("named", "folder"), [(".", "adapter"), ("adapter", "adapter"), (SAVED, SAVED), ("merged", "merged")]
)
def test_a_path_stands_for_an_adapter_or_a_model_of_its_run(run, named, folder):
    source, is_adapter = Source.of(run / named), named != "merged"
    assert (source.folder, source.is_adapter, source.run) == (run / folder, is_adapter, run)
    assert source.adapter == (run / folder if is_adapter else None)


def test_an_adapter_knows_its_base_by_its_name_on_the_hub(run, monkeypatch):
    source = Source.of(run)
    assert source.base == "you/base"
    bases = {"you/base": True, "another/base": True, "you/other": False, "nano": False}
    assert {name: source.is_over(Model(name=name)) for name in bases} == bases
    monkeypatch.setattr(hub, "fingerprint", lambda model: model.name)  # all are on this machine, in other files
    assert {name: source.is_over(Model(name=name)) for name in bases} == bases


def test_a_name_is_no_folder():
    assert Source.of("you/base") == Source(None)
