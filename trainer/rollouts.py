"""rollout: prompts become scored groups. Scoring runs beside the sampling, group by group as they are finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from trainer.rewards.scorer import Scorer
from trainer.types import Completion, Prompt, Sampling, ScoredGroup


class Sampler(Protocol):
    """Samples a group for each prompt and yields (index of the prompt, its completions) as groups are finished."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]: ...


def collect(sampler: Sampler, scorer: Scorer, prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
    """The scored group of each prompt, in the order of the prompts."""
    with ThreadPoolExecutor(max_workers=scorer.parallel) as pool:
        scored = {
            index: pool.submit(scorer.score, prompts[index], completions)
            for index, completions in sampler.sample(prompts, sampling)
        }
    return [scored[index].result() for index in range(len(prompts))]
