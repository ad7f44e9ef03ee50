"""rollout: prompts become scored groups. Scoring runs beside the sampling, group by group as they are finished."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from trainer.config.settings import Config
from trainer.machine import threads
from trainer.problem.curriculum import Curriculum, outcomes, solve_rates
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Sampling, ScoredGroup
from trainer.reward import placebo
from trainer.reward.scorer import Scorer
from trainer.rollout.limits import Say
from trainer.rollout.turns import Stops, TurnTaking
from trainer.watch.tally import Sums, Tally


class Sampler(Protocol):
    """Samples a group for each prompt and yields (index of the prompt, its completions) as groups are finished."""

    owns_copy: bool = False
    """True if it samples from a copy of the model, which may differ from the one that is trained."""

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> Iterator[tuple[int, list[Completion]]]: ...

    def rehearse(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        """Find out how many rows fit, with prompts and answers as long as these can be."""
        return

    def give_back(self) -> bool:
        """Free what is kept from one rollout to the next, now and from now on. False if there was nothing to free."""
        return False

    def context_limit(self) -> int | None:
        """Return how many tokens a prompt and its answer may have; None if only the model limits them."""
        return None

    def frozen(self) -> "Sampler":
        """Return a sampler of the policy as it is now, whatever becomes of it. Every rank calls it."""
        return self

    def each(self) -> "Mapping[str, Sampler]":
        """Return the samplers that share the work, by name, to check them one by one. Every rank calls it."""
        return {"sampler": self}

    def close(self) -> None:
        """Stop what it has started."""
        return


class Exportable(Protocol):
    """A policy that can be written to disk: the one that is trained, or a `StaticPolicy`."""

    @property
    def version(self) -> int | None:
        """The number of updates behind what the model computes now, or None while it computes the base."""

    def write_model(self, folder: Path) -> None:
        """Write it in a format that other programs read. Only rank 0 calls it."""


@dataclass(slots=True)
class StaticPolicy:
    """A policy that is not trained: the base model, or an adapter in a folder."""

    adapter: Path | None = None

    @property
    def version(self) -> int | None:
        return None if self.adapter is None else 0

    def write_model(self, folder: Path) -> None:
        assert self.adapter is not None, "a base is not published"
        shutil.copytree(self.adapter, folder)


@dataclass(frozen=True, slots=True)
class SamplingContext:
    """What a sampler needs to know of a run."""

    config: Config
    policy: Exportable
    location: str  # of the base: a folder, or a name on the hub
    dtype: str
    context_length: int  # tokens that a prompt and its answer may have
    stops: Stops
    folder: Path  # for published versions and logs
    say: Say
    prompter: Prompter | None = None

    @property
    def turns(self) -> TurnTaking:
        return TurnTaking(self.stops, self.prompter, self.config.rollout.turns)


ScoredRollout = tuple[list[ScoredGroup], Sums]  # groups, and what was measured while they were scored


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Draws the problems of each step, and samples and scores a group of answers to each.

    The groups of the next step may be sampled ahead, in a thread, while the policy trains on those of this one. After a
    failure they are lost, and so are those of a run that is told to stop; the resumed run samples them again. None are
    under way at a checkpoint that is due by the settings, because the loop then does not sample ahead.
    """

    config: Config
    curriculum: Curriculum
    prompter: Prompter
    sampler: Sampler
    scorer: Scorer
    longest: Prompt  # among the training problems
    under_way: dict[int, Future[ScoredRollout]] = field(default_factory=dict)  # by the step that they are of

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return this rank's share of the prompts of a step."""
        return self.prompts(self.curriculum.draw(step))

    def scored_groups(
        self, prompts: Sequence[Prompt], step: int, tally: Tally, samples_ahead: bool
    ) -> list[ScoredGroup]:
        """Return the scored groups of a step; with `samples_ahead`, start sampling those of the next step."""
        begun = self.under_way.pop(step, None)
        assert not self.under_way, "what was begun is what comes next"
        groups, measured = begun.result() if begun else self._sampled(self.sampler, prompts, step)
        tally.merge(measured)
        self._observe(groups)
        if samples_ahead:
            following, frozen = self.prompts_of(step + 1), self.sampler.frozen()
            self.under_way[step + 1] = threads.begin(partial(self._sampled, frozen, following, step + 1))
        return groups

    def sampling_of(self, step: int, number: int = 0) -> Sampling:
        """Return how to sample: the seed follows from run, step and round, on every rank and in a resumed run."""
        # No two of these are equal: a run has fewer than 1,000,003 steps, and a seed below a million keeps what is
        # before the rounds below 2**40.
        seed = self.config.run.seed * 1_000_003 + step + number * 2**40
        rollout = self.config.rollout
        return Sampling(rollout.group_size, rollout.temperature, rollout.max_new_tokens, seed)

    def close(self) -> None:
        self.under_way.clear()
        self.sampler.close()

    def _sampled(self, sampler: Sampler, prompts: Sequence[Prompt], step: int) -> ScoredRollout:
        """Return groups and what the scorer measured, which is of these groups: one step is sampled at a time."""
        rollout = self.config.rollout
        self.scorer.drain()  # forget what was measured in an evaluation
        groups = self._collected(sampler, prompts, self.sampling_of(step))
        if rollout.dead_groups == "refill":
            # ranks cannot meet in the thread that samples ahead, so each of them then fills its own gaps
            everywhere = list if rollout.ahead else distributed.dealt
            groups = refill(groups, partial(self._fresh, sampler, step), rollout.refills, everywhere)
        return groups, self.scorer.drain()

    def _fresh(self, sampler: Sampler, step: int, number: int, missing: int, before: int) -> list[ScoredGroup]:
        problems = self.curriculum.spare(step, number)
        if self.config.rollout.ahead:  # `before` counts the groups of this rank alone
            shared = self.prompts(problems, before * distributed.world_size())[:missing]
        else:
            shared = self.prompts(problems[:missing], before)
        return self._collected(sampler, shared, self.sampling_of(step, number)) if shared else []

    def _collected(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
        return collect(sampler, self.scorer, prompts, sampling)

    def prompts(self, problems: Sequence[Problem], before: int = 0) -> list[Prompt]:
        """Return this rank's share of the next prompts. A problem that comes again repeats the first."""
        seen: Counter[str] = Counter()
        shared = []
        for place, problem in enumerate(problems, before):
            if place % distributed.world_size() == distributed.rank():
                shared.append(replace(self.prompter.prompt(problem), repeat=seen[problem.id], place=place))
            seen[problem.id] += 1
        return shared

    def _observe(self, groups: Sequence[ScoredGroup]) -> None:
        """Tell the curriculum how every rank did, so that all of them go on drawing the same problems."""
        has_golds = self.config.task.answer != "none"
        worth = f"correct_{self.config.reward.answer}" if has_golds else "reward"
        seen = distributed.dealt(outcomes(groups, worth))
        self.curriculum.observe(solve_rates(seen, scales=not has_golds))


class PlaceboRollouts(Rollouts):
    """Replaces the rewards by those of `reward.control`, the control of an experiment."""

    def _collected(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
        groups = super()._collected(sampler, prompts, sampling)
        return [placebo.replace_rewards(group, self.config.reward.control, sampling.seed) for group in groups]


def collect(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    report: Callable[[], None] = lambda: None,
) -> list[ScoredGroup]:
    """Return the scored group of each prompt, in the order of the prompts. Each that is finished is reported."""
    pool = ThreadPoolExecutor(max_workers=scorer.parallel)
    scored: dict[int, Future[ScoredGroup]] = {}
    pending: set[Future[ScoredGroup]] = set()
    try:
        for index, completions in sampler.sample(prompts, sampling):
            report()
            scored[index] = pool.submit(scorer.score, prompts[index], completions)
            pending = _wait_for({*pending, scored[index]}, timeout=0)
        _wait_for(pending)
    finally:
        pool.shutdown(cancel_futures=True)  # after a failure, what has not begun is not worth the wait
    return [scored[index].result() for index in range(len(prompts))]


def refill(
    groups: Sequence[ScoredGroup],
    more: Callable[[int, int, int], list[ScoredGroup]],
    rounds: int,
    everywhere: Callable[[list[bool]], list[bool]] = list,
) -> list[ScoredGroup]:
    """Return the groups with fresh ones added, until as many groups are live as there were at first. `more` takes the
    number of the round, from 1, how many groups are missing, and how many there are. `everywhere` returns what the
    ranks say of their groups."""
    collected, wanted = list(groups), 0
    for number in range(1, rounds + 1):
        live = everywhere([not group.is_dead for group in collected])
        wanted = wanted or len(live)
        if sum(live) == wanted:
            break
        collected += more(number, wanted - sum(live), len(live))
    return collected


def _wait_for(scored: set[Future[ScoredGroup]], timeout: float | None = None) -> set[Future[ScoredGroup]]:
    """Wait until all are done or one has failed. Return those that are not done; raise the error of one that failed."""
    done, pending = wait(scored, timeout, return_when=FIRST_EXCEPTION)
    for one in done:
        one.result()
    return pending
