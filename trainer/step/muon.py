"""step: orthogonal updates, as in Muon (https://kellerjordan.github.io/posts/muon), without its momentum.

Each factor of an adapter changes along its gradient G with singular values that are nearly alike: (G G' + d)^(-1/2) G.
So directions that few answers have shown count as much as those that all of them share. The matrices have few rows or
columns, so this is computed exactly; `d` keeps small what is only rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

DAMPING = 0.03  # singular values below this share of the largest one stay smaller


def orthogonal(gradient: Sequence[Tensor]) -> list[Tensor]:
    """Return each matrix with nearly equal singular values, and anything else in its own direction. The learning rate
    is then about the mean change of a weight. All values have to be finite."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, part in enumerate(gradient):
        places.setdefault(tuple(part.shape), []).append(place)
    update = list(gradient)
    for shape, alike in places.items():  # matrices of one shape are computed together
        stacked = torch.stack(
            [gradient[place].reshape(1, -1) if len(shape) == 1 else gradient[place] for place in alike]
        )
        for place, part in zip(alike, _orthogonal(stacked) * max(shape) ** 0.5, strict=True):
            update[place] = part.reshape(shape)
    return update


def _orthogonal(stacked: Tensor) -> Tensor:
    is_tall = stacked.size(-2) > stacked.size(-1)
    wide = (stacked.mT if is_tall else stacked).double()
    values, vectors = torch.linalg.eigh((wide @ wide.mT).cpu())  # on a card, many small ones take longer
    damped = values.clamp(min=0) + DAMPING**2 * values[..., -1:]
    scale = damped.clamp(min=torch.finfo(damped.dtype).tiny).rsqrt()
    root = (vectors * scale[..., None, :]) @ vectors.mT
    changed = root.to(wide.device) @ wide
    return (changed.mT if is_tall else changed).to(stacked.dtype)
