"""The numbers of a step. Each one is an accumulator, so the numbers of several ranks combine exactly.

>>> tally.add("loss", 3.0, weight=7)            # the mean over 7 tokens
>>> tally.merge({"ratio/max": Max(1.2)})        # any other kind
"""

from collections.abc import Callable, Mapping
from math import sqrt
from operator import add
from typing import Any, NamedTuple


class Mean(NamedTuple):
    amount: float
    weight: float

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.amount / self.weight} if self.weight else {}


class Single(NamedTuple):
    amount: float

    def metrics(self, name: str) -> dict[str, float]:
        return {name: self.amount}


class Total(Single): ...


class Min(Single): ...


class Max(Single): ...


class Std(NamedTuple):
    """The sums from which a mean, `NAME/mean`, and a standard deviation, `NAME/std`, are computed."""

    amount: float
    squares: float
    weight: float

    def metrics(self, name: str) -> dict[str, float]:
        mean = self.amount / self.weight
        deviation = sqrt(max(0.0, self.squares / self.weight - mean**2))
        return {f"{name}/mean": mean, f"{name}/std": deviation}


class Correlation(NamedTuple):
    """The sums from which two metrics are computed. `NAME/correlation` relates x and y, each around its mean within a
    part of a group; `NAME/share` is the share of the variance of y within groups that is within these parts."""

    xy: float
    xx: float
    yy: float
    whole_yy: float
    weight: float

    def metrics(self, name: str) -> dict[str, float]:
        if not all((self.xx, self.yy, self.whole_yy)):
            return {}
        xy, xx, yy, whole = (value / self.weight for value in self[:4])
        return {f"{name}/correlation": xy / sqrt(xx * yy), f"{name}/share": yy / whole}


KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Mean, Total, Min, Max, Std, Correlation)}
Accumulator = Mean | Single | Std | Correlation
Sums = Mapping[str, Accumulator]
Sent = dict[str, tuple[str, Accumulator]]  # includes the name of the kind, because ranks exchange JSON


def _combined(first: Any, second: Any) -> Any:
    """Return the smaller `Min`, the larger `Max`, or for any other kind the element-wise sum."""
    extreme = {Min: min, Max: max}.get(type(first))
    return extreme(first, second) if extreme else type(first)(*map(add, first, second))


class Tally:
    """Holds accumulators by name; `means` converts them to metrics."""

    def __init__(self) -> None:
        self.sums: dict[str, Any] = {}

    def add(self, name: str, amount: float, weight: float = 1.0) -> None:
        """Add to a mean the sum `amount` of `weight` values."""
        self.merge({name: Mean(float(amount), float(weight))})

    def merge(self, sums: Sums) -> None:
        for name, other in sums.items():
            self.sums[name] = _combined(self.sums[name], other) if name in self.sums else other

    def packed(self) -> Sent:
        return {name: (type(sums).__name__, sums) for name, sums in self.sums.items()}

    def means(self, gather: Callable[[Sent], list[Sent]]) -> dict[str, float]:
        """Return the metrics over all ranks; `gather` returns the packed accumulators of every rank."""
        total = Tally()
        for sent in gather(self.packed()):
            total.merge({name: KINDS[kind](*sums) for name, (kind, sums) in sent.items()})
        return {key: value for name, sums in total.sums.items() for key, value in sums.metrics(name).items()}
