"""Orthogonal updates; test_engine.py holds a run's against plain PyTorch."""

import torch

from trainer.step import muon
from trainer.step.muon import make_orthogonal


def test_every_direction_of_a_gradient_counts_alike():
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 32), (48, 4), (4, 32), (7,)]
    gradient = [torch.randn(*shape, generator=generator) for shape in shapes]
    gradient[0] *= torch.tensor([[100.0], [1.0], [1.0], [0.1]])  # a direction that nearly all answers share
    update = [part.clone() for part in gradient]
    make_orthogonal(update)
    assert [one.shape for one in update] == [one.shape for one in gradient]
    for before, after in zip(gradient[:3], update, strict=False):
        values = torch.linalg.svdvals(after) / max(after.shape) ** 0.5
        assert 0.03 < values.min() <= values.max() < 1.001
        assert values.max() > 0.99
        assert (before * after).sum() > 0
    torch.testing.assert_close(update[3], gradient[3] / gradient[3].square().mean().sqrt(), atol=0, rtol=1e-3)


def test_the_size_of_a_gradient_has_no_say_unless_it_is_only_rounding():
    sizes = {1e-3: 1.0, 1e10: 1.0, 1e-10: 0.014, 0.0: 0.0}
    for size, share in sizes.items():
        update = torch.full((2, 3), size)
        make_orthogonal([update])
        torch.testing.assert_close(update, torch.full((2, 3), share / 2**0.5), atol=1e-3, rtol=0)


def test_a_few_matrices_at_a_time_are_changed_alike(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    gradient = [torch.randn(5, 3, generator=generator) for _ in range(5)]
    together, in_turn = ([part.clone() for part in gradient] for _ in range(2))
    make_orthogonal(together)
    monkeypatch.setattr(muon, "TOGETHER", 2 * 15)
    make_orthogonal(in_turn)
    torch.testing.assert_close(in_turn, together)
