"""The parts of gradient regularisation; test_engine.py and tests/model/test_variants.py hold the gradient itself."""

import pytest
import torch

from trainer.config.settings import GradReg
from trainer.model.trained_weights import exchanged
from trainer.step.gradient_regularisation import clipped, in_fp32, regularised, strength_at


def test_norms_are_of_all_parameters():
    """The code of the authors clips and logs the norm of what is trained, with what is left out."""
    a, b = torch.tensor([0.0]), torch.tensor([0.0])
    places = []

    def gradient(is_second: bool) -> list[torch.Tensor]:
        places.append([a.item(), b.item()])
        return [*torch.tensor([[12.0], [5.0]] if is_second else [[9.0], [40.0]])]

    mixed, *norms = regularised(gradient, [a, b], 0.01, 0.1, left_out=[b])
    assert norms == pytest.approx([41.0, 13.0])
    first, second = 9.0 * 10 / 41, 12.0 * 10 / 13
    torch.testing.assert_close(mixed, [torch.tensor([first + 10 * (second - first)]), torch.tensor([40.0 * 10 / 41])])
    assert places == [[0.0, 0.0], [pytest.approx(0.01 * first), 0.0]]
    assert clipped([torch.zeros(2)])[0][0].tolist() == [0.0, 0.0], "and nothing is divided by zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_come_back_bit_for_bit_even_after_an_error(dtype):
    weights = torch.nn.Parameter(torch.randn(50).to(dtype))
    before, address = weights.detach().clone(), weights.data_ptr()
    with pytest.raises(ZeroDivisionError), exchanged([weights], [weights.data + 0.1]):
        1 / int(torch.equal(weights, before))  # they have moved, so this is a division by zero
    assert torch.equal(weights, before)
    assert weights.data_ptr() == address  # the engine keeps pointers into this memory


def test_a_small_step_survives_in_full_precision_only():
    weights, places = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16)), []

    def gradient(is_second: bool) -> list[torch.Tensor]:
        places.append(weights.item())
        return [torch.ones(1)]

    regularised(gradient, [weights], eps=1e-3, strength=0.1)
    with in_fp32([weights]):
        regularised(gradient, [weights], eps=1e-3, strength=0.1)
    assert places == [1.0, 1.0, 1.0, pytest.approx(1.001)]  # bf16 knows nothing between 1 and 1.0078
    assert weights.dtype == torch.bfloat16


def test_the_strength_rises_over_the_warm_up():
    settings = GradReg(strength=0.8, warmup=3)
    assert [strength_at(settings, step) for step in (0, 1, 2, 3, 9)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert strength_at(GradReg(), 5) == 0.0
