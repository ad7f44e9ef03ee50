"""The metrics of a run as the rules of `rules.py` see them, during the run or afterwards from metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from trainer.config.settings import Config
from trainer.watch.measure import Measure, measure_of
from trainer.watch.verdict import GAIN, RISE

Metrics = Mapping[str, float]

RECENT = 5  # last steps that most rules examine
EARLY, LATE = 20, 60  # steps at the beginning and at the end that are kept for the rules
LARGE_UPDATE = 0.5  # relative change of the adapter above which a single update is enough evidence


@dataclass(frozen=True)
class History:
    """The settings of a run, and the metrics of its steps in order. Step 0 holds the first evaluation."""

    config: Config
    records: Sequence[Metrics]
    problems: int = 0  # in the training set, if known
    memory: float = 0.0  # GB of the card, or of the machine without one, if known

    @cached_property
    def steps(self) -> list[Metrics]:
        return [record for record in self.records if record["step"]]

    @property
    def measure(self) -> Measure:
        return measure_of(self.config, self.records)

    def kept(self, records: Sequence[Metrics]) -> list[Metrics]:
        """Return the first, best and last records, so that the rules take no longer late in a run than early."""
        late, held_out = max(EARLY, len(records) - LATE), self.measure.logged
        middle = [record for record in records[EARLY:late] if held_out in record]
        best = sorted(middle, key=lambda record: record[held_out])[-3:]
        between = (record for record in middle if record in best or record is middle[-1])
        return [*records[:EARLY], *between, *records[late:]]

    @property
    def evaluations(self) -> list[Metrics]:
        """The records with a held-out result, on the problems of the last one: a resumed run may ask others."""
        found = [record for record in self.records if self.measure.logged in record]
        return [one for one in found if one.get("eval/problems") == found[-1].get("eval/problems")]

    @property
    def evaluated(self) -> list[float]:
        """The held-out results by which the run is judged. The first is of the base, if its problems were the same."""
        return [record[self.measure.logged] for record in self.evaluations]

    @property
    def improved(self) -> float:
        """The increase of the share of right answers. A rise of the rewards by `RISE` deviations counts as `GAIN`."""
        if not self.measure.is_reward:
            return self.grown("accuracy/lenient")
        return self.grown("reward/mean") / max(1e-9, self.now("reward/std")) * GAIN / RISE

    @property
    def chooses_problems(self) -> bool:
        """True if the problems of later steps are harder, or about as hard for the model as before."""
        return self.config.task.curriculum != "none"

    def of(self, name: str) -> list[float]:
        """Return the values of a metric in all steps that have it."""
        return [record[name] for record in self.steps if name in record]

    def recent(self, name: str) -> list[float]:
        """Return the last `RECENT` values of a metric, or an empty list if there are fewer."""
        values = self.of(name)[-RECENT:]
        return values if len(values) == RECENT else []

    def now(self, name: str, otherwise: float = 0.0) -> float:
        """Return the mean of a metric over the last steps."""
        values = self.recent(name)
        return fmean(values) if values else otherwise

    def first(self, name: str) -> float | None:
        """Return the mean of a metric over the first steps; None unless as many steps followed them."""
        values = self.of(name)
        return fmean(values[:RECENT]) if len(values) >= 2 * RECENT else None

    def grown(self, name: str) -> float:
        """Return the increase of the mean of a metric since the first steps."""
        first = self.first(name)
        return 0.0 if first is None else self.now(name) - first

    @property
    def solve_rate(self) -> float:
        return 0.0 if self.measure.is_reward else self.now(self.measure.of_training)

    @cached_property
    def update_size(self) -> float:
        """The median relative change of the adapter in an update, scaled to the peak of the learning rate; 0 unless
        two updates were measured, or one that changed more than `LARGE_UPDATE` of the adapter."""
        updates = [step for step in self.steps if "update_size" in step and step.get("lr")]
        if len(updates) < 2 and not any(step["update_size"] > LARGE_UPDATE for step in updates):
            return 0.0
        return median(step["update_size"] * self.config.algorithm.lr / step["lr"] for step in updates)
