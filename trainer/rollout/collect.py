"""rollout: turn prompts into scored groups. Each finished group is scored while the others are still being sampled."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

from trainer.config.settings import Config
from trainer.machine import threads
from trainer.problem.curriculum import Curriculum, outcomes, solve_rates
from trainer.problem.prompts import Prompter
from trainer.ranks import distributed
from trainer.records import Problem, Prompt, Sampling, ScoredGroup
from trainer.reward import control_rewards
from trainer.reward.scorer import Scorer
from trainer.rollout.interface import Sampler
from trainer.watch.tally import Sums, Tally

ScoredRollout = tuple[list[ScoredGroup], Sums]  # groups, and the measurements of their scorer


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Draws the problems of each step, samples a group of answers to each problem, and scores the groups.

    The groups of the next step may be sampled ahead, in a thread, while the policy trains on the current ones, except
    at a scheduled checkpoint. If the run fails or is stopped, they are lost, and the resumed run samples them again.
    """

    config: Config
    curriculum: Curriculum
    prompter: Prompter
    sampler: Sampler
    scorer: Scorer
    longest: Prompt  # the longest one that the model may have to answer
    under_way: dict[int, Future[ScoredRollout]] = field(default_factory=dict)  # by step

    def prompts_of(self, step: int) -> list[Prompt]:
        """Return this rank's share of the prompts of a step."""
        return self.prompts(self.curriculum.draw(step))

    def scored_groups(
        self, prompts: Sequence[Prompt], step: int, tally: Tally, samples_ahead: bool
    ) -> list[ScoredGroup]:
        """Return the scored groups of a step; with `samples_ahead`, start sampling those of the next step."""
        begun = self.under_way.pop(step, None)
        assert not self.under_way, "only the next step is sampled ahead"
        groups, measured = begun.result() if begun else self._sampled(self.sampler, prompts, step)
        report_missing(self.scorer, measured)
        tally.merge(measured)
        self._observe(groups)
        if samples_ahead:
            following, frozen = self.prompts_of(step + 1), self.sampler.frozen()
            self.under_way[step + 1] = threads.begin(partial(self._sampled, frozen, following, step + 1))
        return groups

    def sampling_of(self, step: int, number: int = 0) -> Sampling:
        """Return the sampling settings of a round of a step, with the same seed on every rank and in a resumed run."""
        # All seeds differ: a run has fewer than 1,000,003 steps, and while run.seed is below a million, the first two
        # terms stay below 2**40.
        seed = self.config.run.seed * 1_000_003 + step + number * 2**40
        rollout = self.config.rollout
        return Sampling(rollout.group_size, rollout.temperature, rollout.max_new_tokens, seed)

    def close(self) -> None:
        self.under_way.clear()
        self.sampler.close()

    def _sampled(self, sampler: Sampler, prompts: Sequence[Prompt], step: int) -> ScoredRollout:
        """Return the scored groups of a step, and what the scorer measured meanwhile. Only one step is sampled at a
        time, so all measurements belong to these groups."""
        rollout = self.config.rollout
        self.scorer.drain()  # discard the measurements of an evaluation
        groups = self._collected(sampler, prompts, self.sampling_of(step))
        if rollout.dead_groups == "refill":
            # the thread that samples ahead cannot use collective operations, so each rank replaces its own groups
            everywhere = list if rollout.ahead else distributed.dealt
            groups = refill(groups, partial(self._fresh, sampler, step), rollout.refills, everywhere)
        return groups, self.scorer.drain()

    def _fresh(self, sampler: Sampler, step: int, number: int, missing: int, before: int) -> list[ScoredGroup]:
        problems = self.curriculum.spare(step, number)
        if self.config.rollout.ahead:  # `before` counts the groups of this rank only
            shared = self.prompts(problems, before * distributed.world_size())[:missing]
        else:
            shared = self.prompts(problems[:missing], before)
        return self._collected(sampler, shared, self.sampling_of(step, number)) if shared else []

    def _collected(self, sampler: Sampler, prompts: Sequence[Prompt], sampling: Sampling) -> list[ScoredGroup]:
        groups = collect(sampler, self.scorer, prompts, sampling)
        return [control_rewards.replace_rewards(group, self.config.reward.control, sampling.seed) for group in groups]

    def prompts(self, problems: Sequence[Problem], before: int = 0) -> list[Prompt]:
        """Return this rank's share of the prompts of some problems, which follow `before` earlier ones in the step. The
        prompts of equal problems differ in `repeat`."""
        seen: Counter[str] = Counter()
        shared = []
        for place, problem in enumerate(problems, before):
            if place % distributed.world_size() == distributed.rank():
                shared.append(replace(self.prompter.prompt(problem), repeat=seen[problem.id], place=place))
            seen[problem.id] += 1
        return shared

    def _observe(self, groups: Sequence[ScoredGroup]) -> None:
        """Pass the outcomes of all ranks to the curriculum, so that every rank keeps drawing the same problems."""
        by_right = self.config.task.answer != "none" and self.config.pay_of_right > 0
        worth = f"correct_{self.config.reward.answer}" if by_right else "reward"
        seen = distributed.dealt(outcomes(groups, worth))
        self.curriculum.observe(solve_rates(seen, scales=not by_right))


def collect(
    sampler: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    report: Callable[[], None] = lambda: None,
) -> list[ScoredGroup]:
    """Return the scored group of each prompt, in the order of the prompts. Call `report` for each sampled group."""
    workers = threads.Workers(scorer.parallel)
    scored: dict[int, Future[ScoredGroup]] = {}
    pending: set[Future[ScoredGroup]] = set()
    try:
        for index, completions in sampler.sample(prompts, sampling):
            report()
            scored[index] = workers.begin(partial(scorer.score, prompts[index], completions))
            pending = _wait_for({*pending, scored[index]}, timeout=0)
        _wait_for(pending)
    finally:
        workers.drop()  # only a failure leaves groups that have not been scored
    return [scored[index].result() for index in range(len(prompts))]


def report_missing(scorer: Scorer, measured: Sums, always: bool = False) -> None:
    """Report the missing grades of all ranks once. Every rank calls it."""
    if "judge" in scorer.weights:
        of_ranks = distributed.gather(scorer.missing(measured))
        if distributed.is_main():
            scorer.report_missing(of_ranks, always)


def refill(
    groups: Sequence[ScoredGroup],
    more: Callable[[int, int, int], list[ScoredGroup]],
    rounds: int,
    everywhere: Callable[[list[bool]], list[bool]] = list,
) -> list[ScoredGroup]:
    """Add groups until as many are live as there were groups at first, or for `rounds` rounds. `more` takes the number
    of the round (from 1), the number of missing groups and that of present groups. `everywhere` gathers a list from all
    ranks."""
    collected, wanted = list(groups), 0
    for number in range(1, rounds + 1):
        live = everywhere([not group.is_dead for group in collected])
        wanted = wanted or len(live)
        if sum(live) == wanted:
            break
        collected += more(number, wanted - sum(live), len(live))
    return collected


def _wait_for(scored: set[Future[ScoredGroup]], timeout: float | None = None) -> set[Future[ScoredGroup]]:
    """Wait until all futures are done, and raise the error of the first that fails. Return those still pending."""
    done, pending = wait(scored, timeout, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()
    return pending
