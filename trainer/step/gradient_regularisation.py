"""step: gradient regularisation (arXiv 2602.18037), a penalty on the norm of the gradient by a finite difference.

    g1 = gradient at theta            g2 = gradient at theta + eps g1            both clipped to norm 10
    gradient of L + strength/2 |grad L|^2  =  g1 + strength H g1  ~  g1 + strength / eps (g2 - g1)

If the whole model is trained, embedding and output layer are excluded: they do not move, and are trained with g1. The
norms include all parameters, as in the authors' code. The gradient is passed as a function, so that tests can do
without a model.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from trainer.config.settings import GradReg
from trainer.model.trained_weights import exchanged

LARGEST_NORM = 10.0
Gradient = list[Tensor]  # one tensor for each parameter, in fp32


def regularised(
    gradient: Callable[[bool], Gradient],
    parameters: Sequence[Tensor],
    eps: float,
    strength: float,
    left_out: Sequence[Tensor] = (),
) -> tuple[Gradient, float, float]:
    """Combine the gradient at the parameters with the one after a step of `eps` along it, which is `gradient(True)`.
    Return it with the norms of the two. Parameters in `left_out` do not move for the second one, and keep the first."""
    takes_part = [all(parameter is not other for other in left_out) for parameter in parameters]
    first, first_norm = clipped(gradient(False))
    moves = zip(parameters, first, takes_part, strict=True)
    moved = [(one.data.float() + eps * part).to(one.dtype) if takes else one.data for one, part, takes in moves]
    with exchanged(parameters, moved):
        second, second_norm = clipped(gradient(True))
    mixed = [
        one + strength / eps * (two - one) if takes else one
        for one, two, takes in zip(first, second, takes_part, strict=True)
    ]
    return mixed, first_norm, second_norm


def in_fp32(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Use the parameters in full precision: a step of 1e-3 along a gradient is lost in the eight bits of bf16."""
    return exchanged(parameters, [parameter.data.float() for parameter in parameters])


def norm_of(gradient: Gradient) -> float:
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part) for part in gradient])))


def clipped(gradient: Gradient) -> tuple[Gradient, float]:
    """Return the gradient with its norm clipped, and the norm before clipping."""
    norm = norm_of(gradient)
    scale = min(1.0, LARGEST_NORM / norm) if norm else 1.0
    return [part * scale for part in gradient], norm


def strength_at(settings: GradReg, step: int) -> float:
    """Return the strength at a step, counted from 0. It rises during the warm-up."""
    return settings.strength * min(1.0, (step + 1) / (settings.warmup + 1))
