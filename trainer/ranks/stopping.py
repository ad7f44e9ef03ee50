"""A run that has to stop before its last step: told to by SIGUSR1, or because the time of its job is up.

It stops after a step, when everything is saved, with a status of its own (`errors.Interrupted`), and goes on from there
at its next start. A signal may reach one rank before the others, so they agree on the step. An evaluation may take
longer than the signal comes before the end; what is before it is saved, so there the signal ends the run at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from time import monotonic

from trainer.errors import Interrupted
from trainer.ranks import distributed, slurm

A_WEEK = 7 * 24 * 60.0  # in minutes: what is further away is no limit
SPARE_S = 30.0  # before the time limit: to save, and to leave in peace
TOLD = "SIGUSR1 has come"
GOES_ON = "The same command with the same run.dir goes on from there."
ALL_DONE = "all steps are done and saved, the {} is left to the next start: {}."


class Stopping:
    """Asked after every step, by all ranks."""

    def __init__(self) -> None:
        left = slurm.seconds_left() if distributed.is_main() else None
        self._ends = None if left is None else monotonic() + left
        self._asked_last = monotonic()
        self._longest = 0.0  # time from one question to the next: a step with its checkpoint
        self._evaluation_s = 0.0  # of the longest so far
        self._why = ""
        self.steps = 0  # of this start

    @property
    def limit(self) -> str:
        """What is known of the time limit, in words."""
        left = (self._ends - monotonic()) / 60 if self._ends is not None else inf
        return f", {left:.0f} minutes until its time limit" if left < A_WEEK else ""

    def is_due(self, is_last: bool = False, evaluates: bool = False) -> bool:
        """Whether this step is the last of this start: the same answer on all ranks. What comes before the next
        question has to fit: the evaluation after this step, and a step more."""
        now = monotonic()
        if self.steps:  # the first step has the start of the program before it
            self._longest = max(self._longest, now - self._asked_last)
        self._asked_last = now
        self.steps += 1
        return self._agree((0 if is_last else 2 * self._longest) + (self._evaluation_s if evaluates else 0))

    @contextmanager
    def timing_an_evaluation(self) -> Iterator[None]:
        began = monotonic()
        yield
        took = monotonic() - began
        self._evaluation_s = max(self._evaluation_s, took)
        self._asked_last += took  # it is no part of the step

    @contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """After a step that is saved: the next start does the evaluation, and then goes on with the steps."""
        message = f"stopped in the evaluation after step {step}, which is saved: {TOLD}. {GOES_ON}"
        with self.timing_an_evaluation(), self._at_once(message):
            yield

    def exporting(self) -> AbstractContextManager[None]:
        """After the last step: the result can be written again."""
        return self._at_once(ALL_DONE.format("export", TOLD))

    def merging(self) -> AbstractContextManager[None]:
        """After the export. Beside the merge there is its evaluation to do. A start that made no step tries it all the
        same, or a time limit that is too short would start the run again for ever."""
        if self.steps and self._agree(self._evaluation_s):
            raise Interrupted(ALL_DONE.format("merge", self._why))
        return self._at_once(ALL_DONE.format("merge", TOLD))

    def _at_once(self, message: str) -> AbstractContextManager[None]:
        """Not in a start that made no step: it would be the same at the next one, for ever."""
        return slurm.interruptible(message) if self.steps else nullcontext()

    def stop(self, step: int) -> None:
        raise Interrupted(f"stopped after step {step}, which is saved: {self._why}. {GOES_ON}")

    def _agree(self, seconds: float) -> bool:
        """The first reason of any rank is that of all."""
        reasons = distributed.gather(self._reason(seconds))
        self._why = next((reason for reason in reasons if reason), "")
        return bool(self._why)

    def _reason(self, seconds: float) -> str:
        if slurm.stop_is_requested():
            return TOLD
        is_short = self._ends is not None and monotonic() + seconds + SPARE_S > self._ends
        return "the time limit of the job is near" if is_short else ""
