"""The evaluation of the base model. A run stores it in `base.json`, so that a resumed run need not repeat it."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trainer.evaluation.evaluate import Evaluation, Outcome
from trainer.machine import disk
from trainer.ranks import distributed
from trainer.records import Draws, Prompt

STORED = TypeAdapter(Evaluation)


def keep(folder: Path, evaluation: Evaluation, seconds: float) -> None:
    """Write the evaluation, and the seconds that it took, into the run folder."""
    if not distributed.is_main():
        return
    sampled = evaluation.sampled
    if sampled:
        trials = tuple(tuple(map(_without_logprobs, trial)) for trial in sampled.trials)
        sampled = replace(sampled, trials=trials)
    stored = replace(evaluation, outcomes=_without_logprobs(evaluation.outcomes), sampled=sampled)
    document = {"seconds": seconds, "evaluation": STORED.dump_python(stored, mode="json")}
    disk.replace(folder / "base.json", json.dumps(document).encode())


def kept(folder: Path, prompts: Sequence[Prompt], draws: Draws | None) -> tuple[Evaluation, float] | None:
    """Return the stored evaluation and its seconds, or None if it is not of these problems. Every rank calls it."""
    document: Any = distributed.gather(_read(folder / "base.json") if distributed.is_main() else None)[0]
    with suppress(LookupError, TypeError, ValueError):
        evaluation, seconds = STORED.validate_python(document["evaluation"]), float(document["seconds"])
        answered = [(one.problem_id, one.question, one.gold) for one in evaluation.outcomes]
        asked = [(one.problem.id, one.problem.question, one.problem.gold) for one in prompts]
        if answered == asked and draws == (evaluation.sampled.draws if evaluation.sampled else None):
            return evaluation, seconds
    return None


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError):
        return disk.parsed(path.read_bytes())


def _without_logprobs(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Drop the log-probs and segments, which take the most space and are not compared."""
    return tuple(replace(one, completion=replace(one.completion, logprobs=(), segments=())) for one in outcomes)
