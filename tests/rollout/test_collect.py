"""Groups come back in the order of their prompts, and are the same on any number of ranks; which of its own answers a
model is taught."""

import json
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.conftest import group, refuses
from tests.run_on_ranks import on_ranks
from trainer.config.resolve import resolve
from trainer.errors import CheckpointError, DataError
from trainer.loop import Lessons
from trainer.model.load import load_tokenizer
from trainer.problem.curriculum import CURRICULA
from trainer.problem.prompts import Prompter
from trainer.problem.task import make_task
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Sampling, Score, ScoredGroup, TrainingRow, Turn
from trainer.reward.make import make_verifier
from trainer.rollout import draw_tokens, self_training
from trainer.rollout.collect import Rollouts, collect, refill
from trainer.rollout.interface import Sampler
from trainer.watch.tally import Tally

SAMPLING = Sampling(group=2, temperature=1.0, max_new_tokens=8, seed=0)
PROMPTS = [Prompt(Problem(f"p{number}", "q", "1"), "q", (number,)) for number in range(8)]


class Backwards:
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
    groups = collect(Backwards(), Scorer(), PROMPTS, SAMPLING)
    assert [(one.prompt, one.completions[0].tokens) for one in groups] == [(one, one.tokens) for one in PROMPTS]


def test_a_failing_reward_stops_the_sampling():
    sampler, scorer = Backwards(), Scorer(fails=True)

    class Waiting(Backwards):
        def sample(self, prompts, sampling):
            for one in sampler.sample(prompts, sampling):
                yield one
                assert scorer.failed.wait(timeout=240), "the first group is scored while the next one is sampled"

    with pytest.raises(ValueError, match="a reward that raises"):
        collect(Waiting(), scorer, PROMPTS, SAMPLING)
    assert sampler.sampled < len(PROMPTS)
    assert scorer.calls <= 2


def test_dead_groups_are_refilled_until_as_many_are_live_for_so_many_rounds():
    asked, rounds = [], iter([[group([1, 1]), group([1, 0])], [group([0, 1])]])

    def more(number, count, before):
        asked.append((number, count, before))
        return next(rounds)

    groups = refill([group([1, 0]), group([0, 0]), group([1, 1])], more, rounds=5)
    assert (asked, sum(not one.is_dead for one in groups)) == ([(1, 2, 3), (2, 1, 5)], 3)
    assert len(groups) == 6  # the dead ones are still seen by the log
    numbers = []
    groups = refill([group([0, 0])], lambda number, *_: numbers.append(number) or [group([1, 1])], rounds=3)
    assert (numbers, [one.is_dead for one in groups]) == ([1, 2, 3], [True] * 4)
    assert refill([group([1, 0])], lambda *_: pytest.fail("not asked"), rounds=3) == [group([1, 0])]


FEW = ["rollout.problems=5", "rollout.group_size=4", "rollout.dead_groups=refill", "task.curriculum=solve_rate"]
FEW += ["warmup.steps=4", "warmup.from=samples", "warmup.asked=20", "run.seed=3"]


class Drawing(Sampler):
    """Draws answers by the random numbers that the real samplers use; one in three is right."""

    def __init__(self):
        self.seeds = []

    def sample(self, prompts, sampling):
        self.seeds.append(sampling.seed)
        for index, prompt in enumerate(prompts):
            rng = random.Random(draw_tokens._name(sampling, prompt))
            yield index, [self.answer(rng, prompt.problem.gold) for _ in range(sampling.group)]

    def answer(self, rng, gold):
        text = f"{rng.randrange(9)} so\n#### {gold if rng.random() < 0.3 else 'none'}"
        return Completion((1,) * rng.randrange(1, 9), (0.0,), text, truncated=False)


def rollouts_of(problems: int) -> Rollouts:
    config = resolve("nano", None, FEW)
    task = make_task(config.task)
    curriculum = CURRICULA["solve_rate"](task.train()[:problems], config.rollout.problems, 0, 9)
    prompter = Prompter(load_tokenizer(config.model), config.prompt, task)
    return Rollouts(config, curriculum, prompter, Drawing(), make_verifier(config, task), None)


def seen() -> str:
    """Return what is kept of own answers, the groups of three steps, and what a curriculum has learned from them."""
    rollouts, steps = rollouts_of(7), []
    rows, measured = self_training.sample(rollouts, 0, 0)
    for step in range(3):
        groups = rollouts.scored_groups(rollouts.prompts_of(step), step, Tally(), samples_ahead=False)
        answers = [[group.prompt.problem.id, *(answer.text for answer in group.completions)] for group in groups]
        steps.append(distributed.dealt(answers))
    return json.dumps([[row.prompt for row in rows], measured, steps, rollouts.curriculum.state()])


PROGRAM = """
from trainer.ranks import distributed
from tests.rollout.test_collect import seen
distributed.connect(60.0)
print(seen())
distributed.disconnect()
"""


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_ask_and_keep_what_one_does(count):
    alone = seen()
    assert [said.splitlines()[-1] for said in on_ranks(count, PROGRAM)] == [alone] * count
    assert max(map(len, json.loads(alone)[2])) > 5  # something was refilled


def test_a_problem_that_is_asked_again_gets_other_answers_and_is_kept_as_one():
    rollouts = rollouts_of(2)
    rows, measured = self_training.sample(rollouts, 0, 0)
    assert measured["samples/kept"] == len(rows) == 8  # of two problems, `warmup.keep` each
    prompts = rollouts.prompts(rollouts.curriculum.problems * 10)
    assert sorted({prompt.repeat for prompt in prompts}) == [*range(10)]


def test_own_answers_have_other_random_numbers_than_those_of_the_steps():
    rollouts = rollouts_of(7)
    self_training.sample(rollouts, 0, 0)
    (own,) = rollouts.sampler.seeds
    assert own not in {rollouts.sampling_of(step, number).seed for step in range(50) for number in range(4)}


CONFIG = resolve("nano", None, ["warmup.only=true", "warmup.from=samples", "warmup.steps=5", "warmup.rounds=2"])
PAYS = f"correct_{CONFIG.reward.answer}"


def answers(*found: tuple[str, int, bool]) -> ScoredGroup:
    """A group of answers: the text, how many tokens it has, and whether it is right."""
    completions = tuple(Completion(tuple(range(n)), (-0.5,) * n, text, truncated=n > 9) for text, n, _ in found)
    scores = tuple(Score(float(right), {}, "1", "1", right, right) for *_, right in found)
    return ScoredGroup(Prompt(Problem("p", "q", "1"), "q", (5, 6)), completions, scores)


def test_the_shortest_right_answers_that_differ_are_kept():
    group = answers(("a", 5, True), ("b", 2, False), ("c", 4, True), ("c ", 4, True), ("d", 3, True), ("e", 10, True))
    found = [*self_training.distinct(group, PAYS)]
    assert [len(row.completion) for row in self_training.kept(found, 2)] == [3, 4]
    assert [len(row.completion) for row in self_training.kept(found * 2, 4)] == [3, 4, 5]


def test_conversations_that_end_alike_are_different_answers():
    group = answers(("18", 5, True), ("18", 4, True), ("18", 3, True))
    said = ((Turn("model", text), Turn("model", "18")) for text in ("a", "b", "b"))
    completions = tuple(replace(one, turns=turns) for one, turns in zip(group.completions, said))
    assert [len(row.completion) for row in kept(replace(group, completions=completions))] == [4, 5]


def kept(group: ScoredGroup) -> list[TrainingRow]:
    return self_training.kept(self_training.distinct(group, PAYS), CONFIG.warmup.keep)


def test_a_row_has_an_advantage_of_1_no_probability_of_a_sampler_and_teaches_only_what_the_model_wrote():
    group, written = answers(("a", 3, True)), (True, False, True)
    (row,) = kept(replace(group, completions=(replace(group.completions[0], written=written),)))
    assert (row.prompt, row.completion, row.logprobs) == ((5, 6), (0, 1, 2), (0.0,) * 3)
    assert (row.advantage, row.weight, row.mask) == (1.0, 1.0, written)
    assert {sum(one.mask) for one in Lessons(CONFIG, [row]).of(0)} == {2}  # what the loss is divided by


@pytest.mark.parametrize(("right", "remedy"), [(True, "rollout.max_new_tokens"), (False, "easier problems")])
def test_a_round_without_rows_says_why(monkeypatch, right, remedy):
    monkeypatch.setattr(self_training, "collect", lambda *_: [answers(("a", 10, right), ("b", 3, False))])
    asked = SimpleNamespace(problems=[Problem("p", "q", "1")])
    rollouts = SimpleNamespace(config=CONFIG, curriculum=asked, sampler=None, scorer=None)
    rollouts.prompts = rollouts.sampling_of = lambda *_: []
    with refuses("warmup.from", DataError, names=remedy):
        self_training.sample(rollouts, 0, 0)


def test_the_steps_are_divided_among_the_rounds():
    found = [self_training.round_of(CONFIG.warmup, step) for step in range(5)]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]


def test_a_round_whose_answers_are_gone_is_refused(tmp_path):
    with refuses(tmp_path / "samples/round_002.jsonl", CheckpointError):
        self_training.read(tmp_path, 1)
