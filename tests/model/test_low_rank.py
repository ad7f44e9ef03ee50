"""Octet's own low-rank product equals PEFT's, over each kind of base."""

import pytest
import torch
from torch.testing import assert_close

from trainer.config.settings import Lora, Model
from trainer.model import lora
from trainer.model.load import load_model
from trainer.model.low_rank import LowRank, use_own


def gradients(model):
    hidden = torch.randn(1, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    output = model(inputs_embeds=hidden.requires_grad_()).logits
    output.square().mean().backward()
    found = {name: value.grad for name, value in model.named_parameters() if value.requires_grad}
    model.zero_grad()
    return {"output": output.detach(), "hidden": hidden.grad, **found}


@pytest.mark.parametrize("quantize", ["none", "nf4", "int8"])
def test_results_and_gradients_are_those_of_peft(tiny_model, quantize):
    model = load_model(Model(name=str(tiny_model), quantize=quantize), "fp32", torch.device("cpu"))
    model = lora.add_adapter(model, Lora(r=4, targets="all")).train()
    for name, value in model.named_parameters():
        if "lora_" in name:
            value.data = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).mul(0.1)
    expected = gradients(model)
    use_own(model)
    assert all(type(layer.lora_variant["default"]) is LowRank for _, layer in lora.layers(model))
    found = gradients(model)
    for name, value in expected.items():
        assert_close(found[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()))


def test_a_model_may_change_the_result_in_place(tiny_model):
    model = lora.add_adapter(load_model(Model(name=str(tiny_model)), "fp32", torch.device("cpu")), Lora())
    use_own(model)
    _, layer = next(lora.layers(model))
    layer(torch.ones(1, 2, layer.in_features)).mul_(2).sum().backward()
    assert layer.lora_B["default"].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("settings", [Lora(dora=True, targets="attention"), Lora(targets=("embed_tokens",))])
def test_other_layers_are_left_to_peft(tiny_model, settings):
    model = lora.add_adapter(load_model(Model(name=str(tiny_model)), "fp32", torch.device("cpu")), settings)
    use_own(model)
    assert not any(isinstance(layer.lora_variant.get("default"), LowRank) for _, layer in lora.layers(model))
