"""The largest step that there can be, before the first one: what does not fit shows now, and not at step 600."""

from __future__ import annotations

from trainer import distributed
from trainer.loop import Parts
from trainer.types import MiniBatch, TrainingRow
from trainer.watch.memory import Peak
from trainer.watch.metrics import Phases, Tally


def rehearse(parts: Parts) -> dict[str, Peak]:
    """Sampling and a training pass with the longest prompt and answers of full length, and the memory that they took.

    Every rank calls it. Where it does not fit, parts are made smaller as they are in a step. Nothing is learned.
    """
    phases, rollout = Phases(), parts.config.rollout
    problems = -(-rollout.problems // distributed.world_size())
    with phases("rollout"), parts.policy.gathered():
        parts.sampler.rehearse([parts.longest] * problems, parts.sampling_of(0))
    rows = [_row(parts, index) for index in range(problems * rollout.group_size)]
    largest = [rows[index] for index in parts.packer.arrange(rows)[0]]
    tokens = float(sum(len(row.completion) for row in largest))
    with phases("batch"):
        (minibatch,) = parts.beforehand.prepare([MiniBatch(parts.packer.pack(largest), tokens, tokens)])
    with phases("step"):
        parts.policy.rehearse(parts.gradient(minibatch, Tally()))
    return dict(phases.peaks)


def _row(parts: Parts, index: int) -> TrainingRow:
    """An answer of full length that begins unlike the others, of tokens that the model knows."""
    prompt, length = parts.longest.tokens, parts.config.rollout.max_new_tokens
    completion = [prompt[(index + offset) % len(prompt)] for offset in range(length)]
    return TrainingRow(prompt, completion, [0.0] * length, advantage=1.0)
