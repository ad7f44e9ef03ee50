"""Products with frozen weights in another library than torch's, which must change nothing but the rounding."""

from pathlib import Path

import pytest
import torch

from trainer.machine import hardware
from trainer.model import onednn
from trainer.model.fast_lora import _Product

INPUTS = torch.randn(onednn.ROWS, 512, generator=torch.Generator().manual_seed(0))
WEIGHT_OH = torch.randn(256, 512, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def called(monkeypatch):
    """Return the list of the layouts that are computed from now on, on any processor."""
    layouts, reorder = [], torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(onednn, "_gains", lambda device: device.type == "cpu")
    spied = lambda *arguments: layouts.append(arguments) or reorder(*arguments)  # noqa: E731
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", spied)
    return layouts


BIASES = [None, torch.arange(256.0), torch.arange(512.0)[::2], torch.ones(1).expand(256)]
LARGE = [(INPUTS, WEIGHT_OH, bias, onednn.ROWS) for bias in BIASES]
LARGE += [(INPUTS, WEIGHT_OH.t().contiguous().t(), None, onednn.ROWS)]
LARGE += [(torch.cat([INPUTS, INPUTS[:3]]), WEIGHT_OH, None, onednn.ROWS + onednn.STEP)]


@pytest.mark.parametrize(("inputs", "weight", "bias", "padded_to"), LARGE)
def test_a_large_product_is_that_of_onednn(called, inputs, weight, bias, padded_to):
    found = onednn.linear(inputs, weight, bias)
    exact = inputs.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-4)
    assert [rows for _, rows in called] == [padded_to]


@pytest.mark.parametrize(("rows", "outputs", "wider", "dtype"), [
    (onednn.ROWS - 1, 256, 1, torch.float32),
    (onednn.ROWS, 255, 1, torch.float32),
    (onednn.ROWS, 256, 1, torch.bfloat16),
    (onednn.ROWS, onednn.NARROW - 1, 8, torch.float32),
])  # fmt: skip
def test_others_are_those_of_torch(called, rows, outputs, wider, dtype):
    inputs, weight = (part.repeat(1, wider).to(dtype) for part in (INPUTS[:rows], WEIGHT_OH[:outputs]))
    assert torch.equal(onednn.linear(inputs, weight), torch.nn.functional.linear(inputs, weight))
    assert not called


def test_a_layer_with_an_adapter_uses_it_in_both_directions(called):
    x, a_RH, b_OR = (INPUTS.clone(), torch.randn(4, 512) / 20, torch.randn(256, 4) / 20)
    expected, found = [], []
    for results in (expected, found):
        parts = [part.clone().requires_grad_() for part in (x, a_RH, b_OR)]
        if results is found:
            output = _Product.apply(None, *parts, 2.0, WEIGHT_OH, None)
        else:
            output = parts[0] @ WEIGHT_OH.t() + 2.0 * (parts[0] @ parts[1].t() @ parts[2].t())
        output.square().mean().backward()
        results += [output, *(part.grad for part in parts)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(called) == 2


@pytest.mark.parametrize(("is_amd", "capability", "expected"), [
    (True, "AVX512", True), (False, "AVX512", False), (True, "AVX2", False),
])  # fmt: skip
def test_only_processors_of_amd_with_avx_512_gain(monkeypatch, is_amd, capability, expected):
    monkeypatch.setattr(hardware, "is_amd", lambda: is_amd)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert onednn._gains.__wrapped__(torch.device("cpu")) is expected
    assert not onednn._gains.__wrapped__(torch.device("cuda"))


def test_the_maker_of_the_processor_is_read_from_linux():
    facts = Path("/proc/cpuinfo")
    assert hardware.is_amd() is (facts.is_file() and "AuthenticAMD" in facts.read_text())
