"""Expected values by hand, beside each case."""

import json

import pytest

from tests.conftest import group
from trainer import advantage
from trainer.config.command_line import resolve
from trainer.config.settings import Algorithm
from trainer.problem.word_problems import NanoTask
from trainer.records import Completion, Problem, Prompt
from trainer.reward.make import make_verifier

EPSILON = 1e-6


def advantages(rewards, method, step_deviation=0.0, **settings):
    return advantage.of(rewards, Algorithm(advantage=method, **settings), step_deviation)


def test_grpo_divides_by_the_population_deviation():
    # mean 0.5, deviation sqrt((4 * 0.25) / 4) = 0.5
    assert advantages([1, 0, 0, 1], "grpo") == pytest.approx([1, -1, -1, 1], rel=3 * EPSILON)
    # mean 0.25, deviation sqrt(0.25 * 0.75) = 0.4330: 0.75 / 0.4330 = 1.7321, -0.25 / 0.4330 = -0.5774
    assert advantages([1, 0, 0, 0], "grpo") == pytest.approx([1.7320508, -0.5773503, -0.5773503, -0.5773503], rel=1e-5)
    # over G - 1, sqrt((4 * 0.25) / 3) = 0.5774, + 0.1 = 0.6774: 0.5 / 0.6774 = 0.7382
    expected = [0.7381705, -0.7381705, -0.7381705, 0.7381705]
    assert advantages([1, 0, 0, 1], "grpo", advantage_ddof=1, advantage_eps=0.1) == pytest.approx(expected, rel=1e-5)
    # dr_grpo does not divide, and batch_std divides by the deviation of the step
    assert advantages([1, 0, 0, 0], "dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25])
    assert advantages([1, 0], "batch_std", step_deviation=0.25) == pytest.approx([2, -2], rel=1e-5)


def test_rloo_leaves_the_answer_itself_out_of_the_mean():
    # the others of the first have mean 0: 1 - 0 = 1; those of the second have mean (1 + 0 + 0) / 3: 0 - 1/3
    assert advantages([1, 0, 0, 0], "rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # 3 - (1 + 2) / 2 = 1.5, 1 - (3 + 2) / 2 = -1.5, 2 - (3 + 1) / 2 = 0
    assert advantages([3, 1, 2], "rloo") == pytest.approx([1.5, -1.5, 0])


@pytest.mark.parametrize("method", ["grpo", "dr_grpo", "rloo", "batch_std"])
def test_advantages_of_a_group_sum_to_zero(method):
    assert sum(advantages([0.1, 0.7, 1.15, 0.0, 0.3], method, 0.4)) == pytest.approx(0, abs=1e-12)
    assert advantages([None, 0.7], method, advantage_ddof=1) == [None, 0.0]  # a single reward has none


def test_a_completion_without_a_reward_is_no_part_of_the_group():
    assert advantages([1, None, 0], "dr_grpo") == [0.5, None, -0.5]
    assert advantages([1, None, 0], "rloo") == [1.0, None, -1.0]
    assert advantages([None, None], "grpo") == [None, None]


def test_a_group_is_dead_when_its_rewards_have_no_range():
    assert all(group(rewards).is_dead for rewards in ([1, 1, 1], [0.0, 0.0], [None, 1, 1], [None, None]))
    assert not any(group(rewards).is_dead for rewards in ([0, 1], [0.1, 0.1 + 1e-9]))


@pytest.mark.parametrize(
    ("weights", "texts", "by_reward", "by_correctness"),
    [
        ({"correct": 1.0, "overlong": 0.5}, ["#### 1", "#### 2", "and so on " * 9 + "#### 3"], False, True),
        ({"correct": 1.0, "format": 0.1}, ["#### 1", "#### 2", "three"], False, True),
        ({"correct": 1.0, "format": 0.1}, ["#### 18", "#### 2", "three"], False, False),
        ({"correct": 1.0, "overlong": 0.5}, ["#### 18", "#### 18", "and so on " * 9 + "#### 18"], False, True),
        ({"correct": 0.0, "format": 0.1}, ["#### 18", "#### 2", "#### 3"], True, True),
    ],
)
def test_a_group_is_dead_by_reward_or_by_correctness(weights, texts, by_reward, by_correctness):
    prompt = Prompt(Problem("p", "q", "18"), "q", (5,))
    completions = [Completion((7,) * len(text), (-0.5,) * len(text), text, False) for text in texts]
    for by, dead in (("reward", by_reward), ("correct", by_correctness)):
        settings = [f"reward.weights={json.dumps(weights)}", f"rollout.dead_by={by}", "rollout.max_new_tokens=99"]
        scorer = make_verifier(resolve("nano", None, settings), NanoTask())
        assert scorer.score(prompt, completions).is_dead is dead
