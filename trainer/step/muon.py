"""step: orthogonal updates, as in Muon (https://kellerjordan.github.io/posts/muon), without its momentum.

Each trained matrix changes along its gradient G with singular values that are nearly alike: (G G' + d)^(-1/2) G. So
directions that few answers have shown count as much as those that all of them share. The factors of an adapter have few
rows or columns, so this is computed exactly; for a whole model it takes long. `d` keeps small what is only rounding, in
a direction or in all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

DAMPING = 0.03  # singular values below this share of the largest one stay smaller
EPS = 1e-8  # and so does a gradient whose values are smaller than this, as with Adam
TOGETHER = 2**24  # values of all matrices of one shape that are computed at once, for the sake of memory


def make_orthogonal(gradient: Sequence[Tensor]) -> None:
    """Give each matrix nearly equal singular values, and scale anything else, so that the learning rate is about the
    mean change of a weight. All values have to be finite."""
    alike: dict[torch.Size, list[Tensor]] = {}
    for part in gradient:
        alike.setdefault(part.shape, []).append(part)
    for shape, parts in alike.items():
        most = max(1, TOGETHER // shape.numel())
        for some in (parts[first : first + most] for first in range(0, len(parts), most)):
            stacked = torch.stack(some).reshape(len(some), -1, shape[-1])
            for part, changed in zip(some, _orthogonal(stacked), strict=True):
                part.copy_(changed.reshape(shape))


def _orthogonal(stacked: Tensor) -> Tensor:
    is_tall = stacked.size(-2) > stacked.size(-1)
    wide = stacked.mT if is_tall else stacked
    longer = wide.size(-1)
    values, vectors = torch.linalg.eigh((wide @ wide.mT).double().cpu())  # on a card, many small ones take longer
    damped = values.clamp(min=0) + DAMPING**2 * values[..., -1:].clamp(min=0) + EPS**2 * longer
    root = (vectors * damped.rsqrt()[..., None, :]) @ vectors.mT
    changed = longer**0.5 * root.to(wide) @ wide
    return changed.mT if is_tall else changed
