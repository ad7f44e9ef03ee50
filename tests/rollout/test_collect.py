"""Groups come back in the order of their prompts, and a reward that fails ends the rollout at once."""

import threading

import pytest

from tests.conftest import group
from trainer.records import Completion, Problem, Prompt, Sampling, ScoredGroup
from trainer.rollout.collect import collect, refill

SAMPLING = Sampling(group=2, temperature=1.0, max_new_tokens=8, seed=0)
PROMPTS = [Prompt(Problem(f"p{number}", "q", "1"), "q", (number,)) for number in range(8)]


class Sampler:
    """Finishes the last prompt first, and notes how far it came."""

    def __init__(self) -> None:
        self.sampled = 0

    def sample(self, prompts, sampling):
        for index in reversed(range(len(prompts))):
            self.sampled += 1
            yield index, [Completion((index,), (-0.1,), "x", truncated=False)] * sampling.group


class Scorer:
    parallel = 1

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.calls, self.failed = fails, 0, threading.Event()

    def score(self, prompt, completions):
        self.calls += 1
        if self.fails:
            self.failed.set()
            raise ValueError("a reward that raises")
        return ScoredGroup(prompt, tuple(completions), ())


def test_groups_are_in_the_order_of_the_prompts():
    groups = collect(Sampler(), Scorer(), PROMPTS, SAMPLING)
    assert [group.prompt for group in groups] == PROMPTS
    assert [group.completions[0].tokens for group in groups] == [prompt.tokens for prompt in PROMPTS]


def test_a_failing_reward_stops_the_sampling():
    sampler, scorer = Sampler(), Scorer(fails=True)

    class Waiting(Sampler):
        def sample(self, prompts, sampling):
            for one in sampler.sample(prompts, sampling):
                yield one
                assert scorer.failed.wait(timeout=240), "the first group is scored while the next one is sampled"

    with pytest.raises(ValueError, match="a reward that raises"):
        collect(Waiting(), scorer, PROMPTS, SAMPLING)
    assert sampler.sampled < len(PROMPTS)
    assert scorer.calls <= 2


def test_dead_groups_are_refilled_until_as_many_are_live():
    asked, rounds = [], iter([[group([1, 1]), group([1, 0])], [group([0, 1])]])

    def more(number, count, before):
        asked.append((number, count, before))
        return next(rounds)

    groups = refill([group([1, 0]), group([0, 0]), group([1, 1])], more, rounds=5)
    assert asked == [(1, 2, 3), (2, 1, 5)]
    assert sum(not one.is_dead for one in groups) == 3
    assert len(groups) == 6  # the dead ones are still seen by the log


def test_refilling_has_a_bound_and_none_where_all_are_live():
    asked = []
    groups = refill([group([0, 0])], lambda number, *_: asked.append(number) or [group([1, 1])], rounds=3)
    assert asked == [1, 2, 3]
    assert all(one.is_dead for one in groups)
    assert refill([group([1, 0])], lambda *_: pytest.fail("not asked"), rounds=3) == [group([1, 0])]
