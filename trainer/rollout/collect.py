"""rollout: prompts become scored groups. Scoring runs beside the sampling, group by group as they are finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Protocol

from trainer.records import Completion, Prompt, Sampling, ScoredGroup
from trainer.reward.scorer import Scorer


class Sampler(Protocol):
    """Samples a group for each prompt and yields (index of the prompt, its completions) as groups are finished."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]: ...

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Find out how much fits with prompts and answers as long as these can be."""
        return

    def give_back(self) -> bool:
        """Free what is kept between rollouts, from now on after each of them. False where nothing was left to free."""
        return False

    def frozen(self) -> Sampler:
        """The same, from the policy of this moment, whatever becomes of it. Every rank calls it, in the main thread.
        The model that is being trained cannot be frozen, and never samples ahead."""
        return self

    def each(self) -> Mapping[str, Sampler]:
        """Those that share the work, by name, to be looked at one by one. Every rank calls it."""
        return {"sampler": self}

    def close(self) -> None:
        """End what it has started."""
        return


def collect(sampler: Sampler, scorer: Scorer, prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
    """The scored group of each prompt, in the order of the prompts."""
    pool = ThreadPoolExecutor(max_workers=scorer.parallel)
    scored: dict[int, Future[ScoredGroup]] = {}
    try:
        for index, completions in sampler.sample(prompts, sampling):
            scored[index] = pool.submit(scorer.score, prompts[index], completions)
            _raise_first_failure(scored, timeout=0)
        _raise_first_failure(scored)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure, what has not begun is not worth the wait
    return [scored[index].result() for index in range(len(prompts))]


def refill(
    groups: Sequence[ScoredGroup], more: Callable[[int, int], list[ScoredGroup]], rounds: int
) -> list[ScoredGroup]:
    """The groups, and fresh ones until as many are live as there were: `more` has the round and how many it lacks."""
    wanted, collected = len(groups), list(groups)
    for number in range(1, rounds + 1):
        missing = wanted - sum(not group.is_dead for group in collected)
        if not missing:
            break
        collected += more(number, missing)
    return collected


def _raise_first_failure(scored: Mapping[int, Future[ScoredGroup]], timeout: float | None = None) -> None:
    """Wait until all are done or one has failed. Without a failure it does nothing else."""
    for done in wait(scored.values(), timeout, return_when=FIRST_EXCEPTION).done:
        done.result()
