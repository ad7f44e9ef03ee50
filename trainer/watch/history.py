"""The metrics of a run as the rules of `rules.py` look at them: while it goes on, or afterwards from metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from trainer.config.settings import Config
from trainer.watch.measure import Measure, measure_of
from trainer.watch.verdict import GAIN, RISE

Metrics = Mapping[str, float]

RECENT = 5  # steps that most rules look at
EARLY, LATE = 20, 60  # steps at the beginning and at the end that are kept for the rules
LARGE_UPDATE = 0.5  # relative change of the adapter from which on a single update counts


def kept(records: Sequence[Metrics]) -> list[Metrics]:
    """Return the first, last and best records for the rules: a late step costs no more than an early one."""
    late = max(EARLY, len(records) - LATE)
    middle = [one for one in records[EARLY:late] if evaluated(one) is not None]
    best = sorted(middle, key=lambda one: evaluated(one) or 0.0)[-3:]
    return [*records[:EARLY], *(one for one in middle if one in best or one is middle[-1]), *records[late:]]


def evaluated(record: Metrics) -> float | None:
    """Return the accuracy on the held-out problems after a step, or their reward where that is what is measured."""
    return record.get("eval/accuracy", record.get("eval/reward"))


@dataclass(frozen=True)
class History:
    """The settings of a run, and the metrics of its steps in their order. Step 0 holds the first evaluation."""

    config: Config
    records: Sequence[Metrics]
    problems: int = 0  # in the training set, if known
    memory: float = 0.0  # GB of the card, or of the machine without one, if known

    @cached_property
    def steps(self) -> list[Metrics]:
        return [record for record in self.records if record["step"]]

    @property
    def measure(self) -> Measure:
        return measure_of(self.config)

    @property
    def evaluated(self) -> list[float]:
        """The held-out accuracies or rewards, with that of the base."""
        return [value for record in self.records if (value := evaluated(record)) is not None]

    @property
    def improved(self) -> float:
        """Return by how much the share of right answers has risen. A rise of the rewards by `RISE` deviations counts
        as `GAIN`."""
        if not self.measure.is_reward:
            return self.grown("accuracy/lenient")
        return self.grown("reward/mean") / max(1e-9, self.now("reward/std")) * GAIN / RISE

    def of(self, name: str) -> list[float]:
        """Return a metric of all steps that have it."""
        return [record[name] for record in self.steps if name in record]

    def recent(self, name: str) -> list[float]:
        """Return a metric of the last steps, or nothing if there are fewer than `RECENT` that have it."""
        values = self.of(name)[-RECENT:]
        return values if len(values) == RECENT else []

    def now(self, name: str, otherwise: float = 0.0) -> float:
        """Return the mean of a metric over the last steps."""
        values = self.recent(name)
        return fmean(values) if values else otherwise

    def first(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps, or None unless as many steps came after them."""
        values = self.of(name)
        return fmean(values[:RECENT]) if len(values) >= 2 * RECENT else None

    def grown(self, name: str) -> float:
        """Return by how much the mean of a metric has risen since the first steps."""
        first = self.first(name)
        return 0.0 if first is None else self.now(name) - first

    @property
    def solve_rate(self) -> float:
        return self.now(f"accuracy/{self.config.reward.answer}")

    @cached_property
    def update_size(self) -> float:
        """The median relative change of the adapter in an update, scaled to the peak of the learning rate; 0 if it was
        not measured. A single update counts if it changes the adapter by `LARGE_UPDATE` or more of its size."""
        updates = [one for one in self.steps if "update_size" in one and one.get("lr")]
        if len(updates) < 2 and not any(one["update_size"] > LARGE_UPDATE for one in updates):
            return 0.0
        return median(one["update_size"] * self.config.algorithm.lr / one["lr"] for one in updates)
