"""The evaluation of the base model, which a run keeps in `base.json`: a run that goes on does not ask again."""

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
    sampled = evaluation.sampled
    if sampled:
        trials = (tuple(map(_without_logprobs, trial)) for trial in sampled.trials)
        sampled = replace(sampled, trials=tuple(trials))
    kept = replace(evaluation, outcomes=_without_logprobs(evaluation.outcomes), sampled=sampled)
    if distributed.is_main():
        document = {"seconds": seconds, "evaluation": STORED.dump_python(kept, mode="json")}
        disk.replace(folder / "base.json", json.dumps(document).encode())


def kept(folder: Path, asked: Sequence[Prompt], draws: Draws | None) -> tuple[Evaluation, float] | None:
    """Return the evaluation and its seconds, or None if there is none of these problems. Every rank calls it."""
    found: Any = distributed.gather(_read(folder / "base.json") if distributed.is_main() else None)[0]
    with suppress(LookupError, TypeError, ValueError):
        evaluation, seconds = STORED.validate_python(found["evaluation"]), float(found["seconds"])
        answered = [(one.problem_id, one.question, one.gold) for one in evaluation.outcomes]
        of_draws = evaluation.sampled.draws if evaluation.sampled else None
        problems = (prompt.problem for prompt in asked)
        if answered == [(one.id, one.question, one.gold) for one in problems] and of_draws == draws:
            return evaluation, seconds
    return None


def _read(path: Path) -> Any:
    with suppress(OSError, ValueError, RecursionError):
        return disk.parsed(path.read_bytes())


def _without_logprobs(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Leave out what no comparison reads, and what takes most of the room."""
    return tuple(replace(one, completion=replace(one.completion, logprobs=(), segments=())) for one in outcomes)
