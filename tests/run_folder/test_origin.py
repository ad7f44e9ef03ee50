"""What a checkpoint was made from, compared with what a run that resumes is made from."""

import shutil

import pytest

from trainer.config.settings import Model
from trainer.errors import CheckpointError
from trainer.run_folder.origin import Origin


def test_other_weights_are_refused(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    model = Model(name=str(tmp_path / "model"))
    saved = Origin(model).state()
    Origin(model).load(saved)
    path = tmp_path / "model/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model: its weights are not those that this run began with"):
        Origin(model).load(saved)


def test_other_versions_are_said(capsys):
    saved = Origin(Model(name="nano")).state()
    saved["versions"]["torch"] = "1.0"
    Origin(Model(name="nano")).load(saved)
    assert "the checkpoint was written with torch 1.0: the run goes on" in capsys.readouterr().err


def test_weights_that_are_not_on_this_machine_are_not_compared():
    saved = Origin(Model(name="nano")).state()
    Origin(Model(name="some/where")).load(saved)
