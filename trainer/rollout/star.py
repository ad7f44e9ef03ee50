"""rollout: the model's own right answers as rows to train on, sampled in rounds (STaR, Zelikman et al. 2022).

    <run folder>/samples/round_001.jsonl     the rows of a round

They are kept because the policy that sampled them moves on: a run that is resumed within a round reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from trainer.config.settings import Config
from trainer.errors import CheckpointError, DataError
from trainer.machine import disk
from trainer.problem.task import draw
from trainer.ranks import distributed
from trainer.records import Completion, ScoredGroup, TrainingRow
from trainer.rollout.collect import Rollouts, collect


def round_of(config: Config, step: int) -> tuple[int, int]:
    """Return the round of a step, and its place in the round, both counted from 0."""
    warmup = config.warmup
    number = step * warmup.rounds // warmup.steps
    return number, step - -(-number * warmup.steps // warmup.rounds)


def sample(rollouts: Rollouts, step: int, number: int) -> tuple[list[TrainingRow], dict[str, float]]:
    """Return what is kept of a round, the same on every rank, and what is logged of it. Every rank calls it."""
    config = rollouts.config
    problems = draw(rollouts.curriculum.problems, number, config.warmup.asked, config.run.seed)
    prompts = [rollouts.prompter.prompt(problem) for problem in distributed.mine(problems)]
    groups = collect(rollouts.sampler, rollouts.scorer, prompts, rollouts.sampling_of(step))
    found = [(_facts(group, config), [*kept(group, config)]) for group in groups]
    everywhere = [one for of_rank in distributed.gather(found) for one in of_rank]
    rows = [row for _, of_group in everywhere for row in of_group]
    right, answers = (sum(facts[index] for facts, _ in everywhere) for index in (0, 1))
    if not rows:
        raise DataError(
            f"warmup.from=samples: none of {answers} answers to {len(everywhere)} problems is right in round "
            f"{number + 1}, so there is nothing to learn from. Write warmup.from=solutions, or take easier problems."
        ).of_all()
    return rows, {
        "samples/right": right / answers,
        "samples/solved": fmean(facts[0] > 0 for facts, _ in everywhere),
        "samples/kept": float(len(rows)),
        "samples/length": fmean(len(row.completion) for row in rows),
    }


def kept(group: ScoredGroup, config: Config) -> Iterator[TrainingRow]:
    """Yield the shortest right answers that differ, and were not cut off."""
    right = [completion for completion in _right(group, config) if not completion.truncated]
    distinct = {completion.text.strip(): completion for completion in reversed(right)}
    for completion in sorted(distinct.values(), key=lambda one: one.length)[: config.warmup.keep]:
        yield TrainingRow(
            group.prompt.tokens,
            completion.tokens,
            (0.0,) * len(completion.tokens),
            advantage=1.0,
            reward=1.0,
            written=completion.written,
        )


def _right(group: ScoredGroup, config: Config) -> list[Completion]:
    pays = f"correct_{config.reward.answer}"
    pairs = zip(group.completions, group.scores, strict=True)
    return [completion for completion, score in pairs if getattr(score, pays)]


def _facts(group: ScoredGroup, config: Config) -> tuple[int, int]:
    return len(_right(group, config)), len(group.completions)


def write(folder: Path, number: int, rows: Sequence[TrainingRow]) -> None:
    if distributed.is_main():
        path = _path(folder, number)
        path.parent.mkdir(exist_ok=True)
        disk.replace(path, "".join(json.dumps(asdict(row)) + "\n" for row in rows).encode())
    distributed.barrier()


def read(folder: Path, number: int) -> list[TrainingRow]:
    """Return the rows of a round that was begun."""
    path = _path(folder, number)
    try:
        return [TrainingRow(**json.loads(line)) for line in path.read_text().splitlines()]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path}: the answers of this round cannot be read ({error}), and the policy that wrote them has moved on. "
            "Restore the file, or delete the checkpoints of the round."
        ) from None


def _path(folder: Path, number: int) -> Path:
    return folder / "samples" / f"round_{number + 1:03d}.jsonl"
