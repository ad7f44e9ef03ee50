"""Expected values by hand, beside each case."""

import pytest

from tests.conftest import group
from trainer.advantages import EPSILON, advantages_of


def test_grpo_divides_by_the_population_deviation():
    # mean 0.5, deviation sqrt((4 * 0.25) / 4) = 0.5
    assert advantages_of([1, 0, 0, 1], "grpo") == pytest.approx([1, -1, -1, 1], rel=2 * EPSILON)


def test_one_right_of_four():
    # mean 0.25, deviation sqrt(0.25 * 0.75) = 0.4330: 0.75 / 0.4330 = 1.7321, -0.25 / 0.4330 = -0.5774
    assert advantages_of([1, 0, 0, 0], "grpo") == pytest.approx(
        [1.7320508, -0.5773503, -0.5773503, -0.5773503], rel=1e-5
    )


def test_dr_grpo_does_not_divide():
    assert advantages_of([1, 0, 0, 0], "dr_grpo") == pytest.approx([0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("method", ["grpo", "dr_grpo"])
def test_advantages_of_a_group_sum_to_zero(method):
    assert sum(advantages_of([0.1, 0.7, 1.15, 0.0, 0.3], method)) == pytest.approx(0, abs=1e-12)


def test_a_completion_without_a_reward_is_no_part_of_the_group():
    assert advantages_of([1, None, 0], "dr_grpo") == [0.5, None, -0.5]
    assert advantages_of([None, None], "grpo") == [None, None]


@pytest.mark.parametrize(
    ("rewards", "dead"),
    [
        ([1, 1, 1], True),
        ([0.0, 0.0], True),
        ([0, 1], False),
        ([None, 1, 1], True),
        ([None, None], True),
        ([0.1, 0.1 + 1e-9], False),
    ],
)
def test_a_group_is_dead_when_its_rewards_have_no_range(rewards, dead):
    assert group(rewards).is_dead is dead
