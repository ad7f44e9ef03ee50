"""An adapter that is trained further: it computes what it did, and one that does not fit is refused by name."""

import pytest
import torch

from tests.conftest import refuses
from trainer.config.settings import Lora, Model
from trainer.errors import CheckpointError
from trainer.model.load import load_model
from trainer.model.lora import add_adapter, save_adapter, trainable


@pytest.fixture(scope="module")
def stored(tiny_model, tmp_path_factory):
    """An adapter of rank 4 with an effect, as a folder."""
    folder = tmp_path_factory.mktemp("stored")
    model = made(tiny_model)
    for value in trainable(model).values():
        value.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    save_adapter(model, folder)
    return folder, trainable(model)


def made(tiny_model, **settings):
    lora = Lora(**({"r": 4, "alpha": 8, "targets": "attention"} | settings))
    return add_adapter(load_model(Model(name=str(tiny_model)), "fp32", torch.device("cpu")), lora)


def test_it_begins_with_the_values_of_the_folder(tiny_model, stored):
    folder, values = stored
    found = trainable(made(tiny_model, start=folder))
    assert found.keys() == values.keys()
    assert all(torch.equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"r": 8}, "4 x 32"), ({"targets": "all"}, "mlp"), ({"alpha": 16}, "lora.alpha=8"), ({"rslora": True}, "=false")],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(tiny_model, stored, settings, named):
    with refuses("lora.start", CheckpointError, names=named):
        made(tiny_model, start=stored[0], **settings)


def test_a_folder_without_an_adapter_or_with_one_that_is_not_finite_is_refused(tiny_model, tmp_path):
    with refuses(f"adapter {tmp_path}", CheckpointError, names="adapter_config.json"):
        made(tiny_model, start=tmp_path)
    model = made(tiny_model)
    next(iter(trainable(model).values())).fill_(float("nan"))
    save_adapter(model, tmp_path)
    with refuses("lora.start", CheckpointError, names="finite"):
        made(tiny_model, start=tmp_path)
