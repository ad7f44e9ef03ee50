"""The files that DeepSpeed writes are read as tensors: nothing in them is run."""

import os

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.conftest import refuses
from trainer.errors import CheckpointError
from trainer.step import engine


class Opens:
    """What a pickle may do: call a function as soon as it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_calls_a_function_is_refused_and_not_run(tmp_path, zipped):
    path, opened = tmp_path / "optim_states.pt", tmp_path / "opened"
    state = {"optimizer": torch.ones(2), "client": Opens(opened)}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with refuses(path, CheckpointError, names="posix.mkdir"):
        engine._load_without_code(str(path))
    assert not opened.exists()


def test_what_deepspeed_saves_is_read(tmp_path):
    scaler = DynamicLossScaler(2.0**16, 2.0, 1000, 1.0, 2)
    torch.save({"loss_scaler": scaler, "zero_stage": ZeroStageEnum(2)}, tmp_path / "states.pt")
    read = engine._load_without_code(str(tmp_path / "states.pt"))
    assert (read["loss_scaler"].cur_scale, read["zero_stage"]) == (2.0**16, ZeroStageEnum.gradients)
