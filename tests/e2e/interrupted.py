"""Runs that are told to stop at a certain moment: forks of this process, which has imported everything once.

python -m tests.e2e.interrupted FOLDER
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import chaos
from trainer import advantage
from trainer.evaluation import best
from trainer.ranks import stopping
from trainer.run import closing, job
from trainer.run_folder import checkpoints

AN_HOUR = "an evaluation takes an hour, and the job has one and a half"
# The moments at which the starts of a run are told; evaluations by the name of what is evaluated.
RUNS: dict[str, Sequence[str]] = {
    **{"undisturbed": [""], "early": ["base", "step 1", ""], "last evaluation": ["step 2", "base"]},
    **{"best": ["best", ""], "merge": ["merge", ""], "time limit": [AN_HOUR, ""]},
    **{"signals": ["SIGHUP", "SIGTERM", ""], "Ctrl-C": ["step", "SIGINT", "end", ""]},
}


def tells(
    moment: str, name: str, work: Callable[..., Any], number: signal.Signals = signal.SIGUSR1
) -> Callable[..., Any]:
    """The same work, and the signal comes just when it begins."""

    def told(*arguments: Any, **named: Any) -> Any:
        if moment == (name or arguments[0]):
            signal.raise_signal(number)
        return work(*arguments, **named)

    return told


def stops(moment: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, and a terminal closes, a launcher ends its ranks, and somebody presses Ctrl-C, as it begins."""

    def stopped(*arguments: Any) -> Any:
        for number in (signal.Signals[moment], signal.Signals[moment], signal.SIGINT):
            signal.raise_signal(number)
        return work(*arguments)

    return stopped if moment in signal.Signals.__members__ else work


def takes_an_hour(work: Callable[..., Any]) -> Callable[..., Any]:
    """The same work, and the clock of `ranks/stopping.py` goes on by an hour."""

    def slow(*arguments: Any, **named: Any) -> Any:
        result, now = work(*arguments, **named), stopping.monotonic
        stopping.monotonic = lambda: now() + 3600
        return result

    return slow


def start(folder: Path, moment: str) -> tuple[int, str]:
    """Return the status, and what was said."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(best, "evaluate", tells(moment, "", best.evaluate))
        patch.setattr(job, "write_merged", tells(moment, "merge", job.write_merged))
        patch.setattr(closing, "conclude", tells(moment, "end", closing.conclude, signal.SIGINT))
        patch.setattr(checkpoints, "seal", stops(moment, checkpoints.seal))
        patch.setattr(advantage, "live_groups", tells(moment, "step", advantage.live_groups, signal.SIGINT))
        patch.setattr(best.EvaluationHistory, "keep", tells(moment, "best", best.EvaluationHistory.keep))
        if moment == AN_HOUR:
            patch.setenv("SLURM_JOB_END_TIME", str(int(time.time() + 1.5 * 3600)))
            patch.setattr(best, "evaluate", takes_an_hour(best.evaluate))
        ended = chaos.start(folder, 1, ["run.steps=2", "eval.every=1"])
    return ended.statuses[0], ended.said


def main(folder: str) -> None:
    chaos.prepare()
    starts = {name: [start(Path(folder, name), moment) for moment in moments] for name, moments in RUNS.items()}
    Path(folder, "starts.json").write_text(json.dumps(starts))


if __name__ == "__main__":
    main(*sys.argv[1:])
