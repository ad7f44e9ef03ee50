"""rollout: the model's own correct answers as training rows, sampled in rounds (STaR, Zelikman et al. 2022).

    <run folder>/samples/round_001.jsonl     the rows of a round

A run that is resumed within a round reads its rows from this file, because the policy has changed since.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from trainer.config.settings import Warmup
from trainer.errors import CheckpointError, DataError
from trainer.machine import disk
from trainer.problem.task import draw
from trainer.ranks import distributed
from trainer.records import Completion, ScoredGroup, TrainingRow
from trainer.rollout.collect import Rollouts, collect

TAG = -1  # in place of the number of a refill, so that the random numbers are not those of GRPO steps


def round_of(warmup: Warmup, step: int) -> tuple[int, int]:
    """Return the round of a step, and the position of the step in its round, both from 0."""
    number = step * warmup.rounds // warmup.steps
    return number, step - -(-number * warmup.steps // warmup.rounds)


def sample(rollouts: Rollouts, step: int, number: int) -> tuple[list[TrainingRow], dict[str, float]]:
    """Sample a round. Return its rows, the same on every rank, and its metrics. Every rank calls it."""
    config = rollouts.config
    problems = draw(rollouts.curriculum.problems, number, config.warmup.asked, config.run.seed)
    groups = collect(rollouts.sampler, rollouts.scorer, rollouts.prompts(problems), rollouts.sampling_of(step, TAG))
    verdict = f"correct_{config.reward.answer}"
    outcomes = [(len(_right(one, verdict)), len(one.completions), [*distinct(one, verdict)]) for one in groups]
    right_counts, counts, distinct_rows = zip(*distributed.dealt(outcomes), strict=True)
    rows = kept((row for of_group in distinct_rows for row in of_group), config.warmup.keep)
    right, answers = sum(right_counts), sum(counts)
    if not rows:
        none = f"{right} of {answers} answers of round {number + 1} are right, and none of these is complete"
        remedy = "Write a larger rollout.max_new_tokens or warmup.from=solutions, or take easier problems"
        raise DataError("warmup.from=samples", f"{none}, so there is nothing to learn from", remedy).of_all()
    return rows, {
        "samples/right": right / answers,
        "samples/solved": fmean(count > 0 for count in right_counts),
        "samples/kept": float(len(rows)),
        "samples/length": fmean(sum(row.mask) for row in rows),
    }


def distinct(group: ScoredGroup, verdict: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (problem, text, row) for each different correct answer that was not truncated."""
    right = [completion for completion in _right(group, verdict) if not completion.truncated]
    texts = ["\n".join(turn.text for turn in answer.turns) or answer.text for answer in right]
    for text, answer in {text.strip(): answer for text, answer in reversed([*zip(texts, right)])}.items():
        zeros = (0.0,) * len(answer.tokens)
        row = TrainingRow(group.prompt.tokens, answer.tokens, zeros, advantage=1.0, reward=1.0, written=answer.written)
        yield group.prompt.problem.id, text, asdict(row)


def kept(answers: Iterable[tuple[str, str, dict[str, Any]]], most: int) -> list[TrainingRow]:
    """Return the `most` shortest different answers to each problem. Several groups may have the same problem."""
    of_problems: dict[str, dict[str, TrainingRow]] = {}
    for problem, text, row in answers:
        of_problems.setdefault(problem, {}).setdefault(text, TrainingRow(**row))
    shortest = (sorted(rows.values(), key=lambda row: sum(row.mask))[:most] for rows in of_problems.values())
    return [row for rows in shortest for row in rows]


def _right(group: ScoredGroup, verdict: str) -> list[Completion]:
    pairs = zip(group.completions, group.scores, strict=True)
    return [completion for completion, score in pairs if getattr(score, verdict)]


def write(folder: Path, number: int, rows: Sequence[TrainingRow]) -> None:
    if distributed.is_main():
        path = _path(folder, number)
        path.parent.mkdir(exist_ok=True)
        disk.replace(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())
    distributed.barrier()


def read(folder: Path, number: int) -> list[TrainingRow]:
    """Return the rows of a round that an earlier process has sampled."""
    path = _path(folder, number)
    try:
        return [TrainingRow(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        reason = f"the answers of this round cannot be read ({error}), and the policy that wrote them has moved on"
        raise CheckpointError(path, reason, "Restore the file, or delete the checkpoints of the round") from None


def _path(folder: Path, number: int) -> Path:
    return folder / "samples" / f"round_{number + 1:03d}.jsonl"
