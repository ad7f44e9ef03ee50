"""Earlier values of parameters: swapped in for a moment, and never lost."""

import contextlib

import pytest
import torch

from trainer.model.trained import Snapshot


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2, dtype=torch.bfloat16)


def move(layer, by: float) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(by)


def test_inside_are_the_earlier_values_and_outside_the_very_same_tensors(layer):
    before = layer.weight.detach().clone()
    snapshot = Snapshot(layer.parameters())
    move(layer, 1.0)
    now, pointers = layer.weight.detach().clone(), [parameter.data_ptr() for parameter in layer.parameters()]
    with snapshot.swapped_in():
        assert torch.equal(layer.weight, before)
        assert layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, now)
    assert [parameter.data_ptr() for parameter in layer.parameters()] == pointers
    with contextlib.suppress(RuntimeError), snapshot.swapped_in():
        raise RuntimeError("the evaluation failed")
    assert torch.equal(layer.weight, now)
