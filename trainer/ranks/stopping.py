"""Stops a run before its last step, after SIGUSR1 or Ctrl-C or near the time limit of its job, and saves regularly.

The run stops after a step, once everything is saved, and exits with the status of `errors.Interrupted`; its next start
continues from there. A signal may reach one rank before the others, so the ranks agree on the step. An evaluation may
take longer than the time that remains after a signal. Everything is saved before it begins, so a signal then
ends the run immediately.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from time import monotonic

from trainer.errors import Interrupted
from trainer.ranks import distributed, signal_handlers, slurm

A_WEEK = 7 * 24 * 60.0  # in minutes; a later time limit is not shown
SPARE_S = 30.0  # reserved before the time limit, to save and to exit
CONTINUES = "The same command with the same run.dir continues from there."
ALL_DONE = "the steps are saved, and the {} is left to the next start: {}."


class Stopping:
    """Decides, together with the other ranks, whether to save and to stop. All ranks call it after every step."""

    def __init__(self, save_minutes: float = inf) -> None:
        self._save_s = 60 * save_minutes
        self.last_save = monotonic()
        self.saves = False  # True if the last checkpoint is old, by the clock of rank 0
        left = slurm.seconds_left() if distributed.is_main() else None
        self._ends = None if left is None else monotonic() + left
        self._last_step_ended = monotonic()
        self._longest_step_s = 0.0  # including its checkpoint
        self.longest_evaluation_s = 0.0
        self._reason = ""
        self.asked = ""  # why the caller of train() stops the run
        self.steps = 0  # the number of steps since this start

    @property
    def limit(self) -> str:
        """The remaining time as a phrase for the log, or "" if there is no time limit."""
        left = (self._ends - monotonic()) / 60 if self._ends is not None else inf
        return f", {left:.0f} minutes until its time limit" if left < A_WEEK else ""

    def is_due(self, is_last: bool = False, evaluates: bool = False) -> bool:
        """Return True, on all ranks, if the run has to stop after this step: after a signal, or if the remaining time
        is too short for the evaluation after this step and for one more step. Set `saves`."""
        now = monotonic()
        if self.steps:  # the first step is excluded, because it includes the start of the program
            self._longest_step_s = max(self._longest_step_s, now - self._last_step_ended)
        self._last_step_ended = now
        self.steps += 1
        step_s = 0 if is_last else 2 * self._longest_step_s
        self.saves = distributed.gather(now - self.last_save > self._save_s)[0]
        return self._agree(step_s + (self.longest_evaluation_s if evaluates else 0))

    @contextmanager
    def timing_an_evaluation(self) -> Iterator[None]:
        began = monotonic()
        yield
        took = monotonic() - began
        self.longest_evaluation_s = max(self.longest_evaluation_s, took)
        self._last_step_ended += took

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Evaluate after a saved step. If the run is interrupted here, its next start evaluates first."""
        message = f"stopped in the evaluation after step {step}, which is saved: {{}}. {CONTINUES}"
        with self.timing_an_evaluation(), self._interruptible(message):
            yield

    def exporting(self) -> AbstractContextManager[None]:
        """Export after the last step. If the run is interrupted here, its next start exports again."""
        return self._interruptible(ALL_DONE.format("export", "{}"))

    def merging(self) -> AbstractContextManager[None]:
        """Merge after the export, and evaluate the merged model. Raise Interrupted if the remaining time is too short.
        A start without steps tries it nevertheless: otherwise a short time limit would requeue the job forever."""
        if self.steps and self._agree(self.longest_evaluation_s):
            raise Interrupted(ALL_DONE.format("merge", self._reason))
        return self._interruptible(ALL_DONE.format("merge", "{}"))

    def _interruptible(self, message: str) -> AbstractContextManager[None]:
        """Let a signal end the run immediately, unless this start has made no step: then the next start would get no
        further."""
        return signal_handlers.interruptible(message) if self.steps else nullcontext()

    def stop(self, step: int) -> None:
        message = f"stopped after step {step}, which is saved: {self._reason}. {CONTINUES}"
        raise signal_handlers.interruption(self._reason, message)

    def _agree(self, seconds: float) -> bool:
        """Return True, on all ranks, if one of them has a reason to stop before work of this duration."""
        is_short = self._ends is not None and monotonic() + seconds + SPARE_S > self._ends
        near = "the time limit of the job is near" if is_short else ""
        reason = signal_handlers.received.reason or self.asked or near
        self._reason = next(filter(None, distributed.gather(reason)), "")
        return bool(self._reason)
