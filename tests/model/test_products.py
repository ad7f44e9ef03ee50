"""Products with frozen weights in another library than torch's, which must change nothing but the rounding."""

import pytest
import torch

from trainer.model import products

INPUTS = torch.randn(products.ROWS, 512, generator=torch.Generator().manual_seed(0))
WEIGHT_OH = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def called(monkeypatch):
    """Return the list of the layouts that are computed from now on, on any processor."""
    layouts, reorder = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(products, "_gains", lambda device: device.type == "cpu")
    spied = lambda *arguments: layouts.append(arguments) or reorder(*arguments)  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", spied)
    return layouts


@pytest.mark.parametrize("bias", [None, torch.arange(256.0)])
def test_a_large_product_is_that_of_oneDNN(called, bias):
    found = products.linear(INPUTS, WEIGHT_OH, bias)
    exact = INPUTS.double() @ WEIGHT_OH.double().t() + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    assert len(called) == 1


def test_so_is_one_with_the_transposed_weight(called):
    found = products.linear(INPUTS, WEIGHT_OH.t().contiguous().t())
    torch.testing.assert_close(found.double(), INPUTS.double() @ WEIGHT_OH.double().t(), rtol=0, atol=1e-4)
    assert len(called) == 1


@pytest.mark.parametrize(("rows", "outputs", "dtype"), [
    (products.ROWS - 1, 256, torch.float32),
    (products.ROWS, 255, torch.float32),
    (products.ROWS, 256, torch.bfloat16),
])  # fmt: skip
def test_others_are_those_of_torch(called, rows, outputs, dtype):
    inputs, weight = INPUTS[:rows].to(dtype), WEIGHT_OH[:outputs].to(dtype)
    assert torch.equal(products.linear(inputs, weight), torch.nn.functional.linear(inputs, weight))
    assert not called
