"""Check that the sampler has the weights of the policy: score some tokens with both before the first step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.batch.pack import Packer
from trainer.errors import ConfigError
from trainer.ranks import distributed
from trainer.records import Prompt, Sampling, Scores, TrainingBatch, TrainingRow
from trainer.rollout.interface import Sampler
from trainer.rollout.limits import Say
from trainer.run.assemble import Run

PROMPTS = 4  # on each rank
TOKENS = 64  # on each rank, from each sampler
NOTABLE = 0.05  # mean difference of log-probs that rounding cannot explain

Measure = Callable[[TrainingBatch], Scores]


def check(run: Run) -> None:
    """Compare the log-probs of sampler and trainer before the first step. Every rank calls it."""
    with run.updater.policy.gathered():
        differences = differences_of(run)
    judge(differences, run.log.config.rollout.vllm.max_difference, run.log.screen.say)


def differences_of(run: Run) -> dict[str, list[float]]:
    rollouts, updater, step = run.rollouts, run.updater, run.log.first_step
    prompts, sampling = rollouts.prompts_of(step), rollouts.sampling_of(step)
    return of_each(updater.policy.measure, updater.packer, updater.device, rollouts.sampler, prompts, sampling)


def judge(differences: Mapping[str, Sequence[float]], limit: float, say: Say) -> None:
    """Report the differences of each sampler, and raise ConfigError if their mean is above the limit."""
    for name, values in differences.items():
        mean = sum(values) / len(values)
        seen = f"the log-probs of {name} and trainer differ by {mean:.1e} on average over {len(values)} tokens"
        say(f"rollout: {seen}, by {max(values):.1e} at most")
        if not mean <= limit:  # also true for NaN
            key, reason = f"rollout.vllm.max_difference={limit:g}", f"{seen}, so another model samples"
            remedy = "Compare the model, its precision and its quantisation on both sides, or allow a larger value"
            raise ConfigError(key, reason, remedy).of_all()
        if mean > NOTABLE:
            say("rollout: that is more than rounding: compare model, precision and quantisation on both sides")


@torch.no_grad()
def of_each(
    measure: Measure, packer: Packer, device: Any, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling
) -> dict[str, list[float]]:
    """Return the differences of the log-probs of some tokens of every rank, for each sampler. Every rank calls it."""
    differences = {}
    for name, one in sampler.each().items():
        found: list[float] = []
        for batch in (part.to(device) for part in packer.pack(_sampled(one, prompts[:PROMPTS], sampling))):
            found += (measure(batch).logprobs_BT - batch.sampled_logprobs_BT)[batch.mask_BT].abs().tolist()
        differences[name] = distributed.dealt(found[:TOKENS])
    return differences


def _sampled(sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> list[TrainingRow]:
    """Return the beginnings of sampled answers, with `TOKENS` tokens together if they are that long."""
    groups = dict(sampler.sample(prompts, sampling))
    share = TOKENS // len(groups)  # only the beginning of each answer, so that one long answer does not use them all
    rows: list[TrainingRow] = []
    in_turn = zip(*(groups[index] for index in sorted(groups)))  # the first answer of each group, then the second
    for index, answer in (pair for of_each in in_turn for pair in zip(sorted(groups), of_each)):
        last = max(place for place, is_written in enumerate(answer.mask[:share], 1) if is_written)
        tokens, logprobs, written = answer.tokens[:last], answer.logprobs[:last], answer.mask[:last]
        rows.append(TrainingRow(prompts[index].tokens, tokens, logprobs, advantage=0.0, written=written))
        if sum(sum(row.mask) for row in rows) >= TOKENS:
            break
    return rows
