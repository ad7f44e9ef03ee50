"""The output of a run, step by step: log lines, samples, checkpoints, and the screen."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any

from trainer.config.settings import Config
from trainer.machine.exits import finishing
from trainer.policy import Policy
from trainer.ranks import distributed
from trainer.ranks.stopping import Stopping
from trainer.records import ScoredGroup, Update
from trainer.run_folder import checkpoints, journal, lock
from trainer.run_folder.checkpoints import Learned
from trainer.run_folder.journal import Journal
from trainer.watch.alarms import Alarms
from trainer.watch.answer_metrics import tally_groups
from trainer.watch.measure import Measure
from trainer.watch.phases import Phases
from trainer.watch.screen import Screen
from trainer.watch.tally import Tally
from trainer.watch.update_metrics import metrics_of_updates


@dataclass(slots=True)
class RunLog:
    """The run folder and the screen of a run, and when the run saves and stops."""

    config: Config
    folder: Path
    learned: Learned
    journal: Journal | None  # on rank 0
    alarms: Alarms
    screen: Screen
    stopping: Stopping
    first_step: int
    total_steps: int
    on_step: Callable[[int, Mapping[str, float]], object] | None = None  # of the caller of train()

    def is_checkpoint(self, done: int) -> bool:
        """Return True if a checkpoint is due after `done` steps in any case."""
        return done == self.total_steps or done % self.config.run.save_every == 0

    def base(self, metrics: Mapping[str, float]) -> None:
        """Write the evaluation of the base into the log, as step 0."""
        if self.journal:
            self.journal.metrics(0, metrics)
        self.alarms.records.append({"step": 0, **metrics})

    def step(
        self, done: int, groups: Sequence[ScoredGroup], metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> None:
        """Log a step and show it. Raise TrainingError if its metrics or the `measured` values must end the run, and
        what the caller's function raises. After its StopIteration the run stops when this step is saved."""
        if self.journal:
            lock.must_still_be_ours(self.folder)
            self.journal.metrics(done, metrics)
            self.journal.samples(done, groups)
            evaluates = self.config.eval.every and done % self.config.eval.every == 0
            if self.config.run.track_answers and (evaluates or self.is_checkpoint(done)):
                self.journal.tracked_answers(done, groups)
        self.screen.step(done, metrics)
        if done == 1 and self.config.reward.control == "none":
            self.screen.answers(groups, self.config.reward.all_weights)
        self.alarms.step(done, {**metrics, **measured})
        try:
            if self.on_step:
                self.on_step(done, dict(metrics))
        except StopIteration:
            if done < self.total_steps:
                self.stopping.asked = "on_step raised StopIteration"

    def save(self, policy: Policy, done: int) -> None:
        """Save a checkpoint of the policy and of the other state of the run."""
        phases = Phases()
        with finishing():
            with phases("save"):
                if self.journal:
                    lock.must_still_be_ours(self.folder)
                    self.journal.sync()
                checkpoints.save(policy, self.folder, done, self.config.run.keep, self.learned)
            self.stopping.last_save = monotonic()
            if self.journal:
                self.journal.add(done, phases.metrics())

    def evaluation(self, done: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation to the log line of its step, which marks it as done."""
        if self.journal:
            self.journal.add(done, metrics)
        self.alarms.evaluation(metrics)

    def close(self) -> None:
        self.screen.close()
        if self.journal:
            self.journal.close()


class Logs:
    """The checksums of the logs, as a part of every checkpoint. A resumed run warns if lines were lost or changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read = dict.fromkeys(journal.FILES, (0, 0, 0))  # bytes, lines and checksum at the last checkpoint

    def state(self) -> dict[str, Any]:
        """Return the number of lines of each file and their checksum. Only new lines are read."""
        for name, (size, count, checksum) in self._read.items():
            lines = [*journal.lines_of(self.folder / name, size)]
            new = lines[:-1] if name == "metrics.jsonl" else lines  # values may still be added to its last line
            text = b"".join(new)
            self._read[name] = size + len(text), count + len(new), zlib.crc32(text, checksum)
        return {name: [count, checksum] for name, (_, count, checksum) in self._read.items()}

    def load(self, state: dict[str, Any]) -> None:
        for name, known in state.items() if distributed.is_main() else ():
            lines = [*islice(journal.lines_of(self.folder / name), known[0])]
            if [len(lines), zlib.crc32(b"".join(lines))] != known:
                left = f"{len(lines)} of {known[0]} lines are left"
                change = "its lines were changed" if len(lines) == known[0] else left
                journal.warn(f"{self.folder / name}: {change} since the checkpoint was saved. The run continues")


def metrics_of(
    groups: Sequence[ScoredGroup], updates: Sequence[Update], tally: Tally, phases: Phases, measure: Measure
) -> dict[str, float]:
    """Return the metrics of a step, which are the same on every rank except times and energy."""
    tally_groups(tally, groups, measure)
    tally.add("groups", len(groups) * distributed.world_size())  # more than rollout.problems after a refill
    return tally.means(distributed.gather) | metrics_of_updates(updates) | costs_of(phases)


def costs_of(phases: Phases) -> dict[str, float]:
    """Return this rank's times and energy of a step, and the memory of the fullest rank. Every rank calls it."""
    ranks = distributed.gather(phases.metrics())
    sizes = [{name: value for name, value in one.items() if name.startswith("memory/")} for one in ranks]
    memory = {name: max(one[name] for one in sizes) for name in sizes[0]}
    if len(ranks) > 1:
        memory["memory/fullest_rank"] = max(range(len(ranks)), key=lambda rank: max(sizes[rank].values()))
    return ranks[distributed.rank()] | memory
