"""Expected values by hand, beside each case."""

import json
from dataclasses import replace
from itertools import product

import pytest

from tests.conftest import group
from trainer import advantage
from trainer.config.resolve import resolve
from trainer.config.settings import Algorithm
from trainer.config.train_options import PRESETS, names_in
from trainer.problem.word_problems import NanoTask
from trainer.records import Completion, Problem, Prompt, Score
from trainer.reward.make import make_verifier


def advantages(rewards, method, step_deviation=0.0, **settings):
    return advantage.of(rewards, Algorithm(advantage=method, **settings), step_deviation)


CASES = [
    # mean 0.5, deviation sqrt((4 * 0.25) / 4) = 0.5
    ([1, 0, 0, 1], "grpo", {}, [1, -1, -1, 1]),
    # mean 0.25, deviation sqrt(0.25 * 0.75) = 0.4330: 0.75 / 0.4330 = 1.7321, -0.25 / 0.4330 = -0.5774
    ([1, 0, 0, 0], "grpo", {}, [1.7320508, -0.5773503, -0.5773503, -0.5773503]),
    # over G - 1, sqrt((4 * 0.25) / 3) = 0.5774, + 0.1 = 0.6774: 0.5 / 0.6774 = 0.7382
    ([1, 0, 0, 1], "grpo", {"advantage_ddof": 1, "advantage_eps": 0.1}, [0.7381705, -0.7381705, -0.7381705, 0.7381705]),
    # dr_grpo does not divide, and batch_std divides by the deviation of the step
    ([1, 0, 0, 0], "dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
    ([1, 0], "batch_std", {"step_deviation": 0.4}, [1.25, -1.25]),
    # the others of the first have mean 0: 1 - 0 = 1; those of the second have mean (1 + 0 + 0) / 3: 0 - 1/3
    ([1, 0, 0, 0], "rloo", {}, [1, -1 / 3, -1 / 3, -1 / 3]),
    # 3 - (1 + 2) / 2 = 1.5, 1 - (3 + 2) / 2 = -1.5, 2 - (3 + 1) / 2 = 0
    ([3, 1, 2], "rloo", {}, [1.5, -1.5, 0]),
]


@pytest.mark.parametrize(("rewards", "method", "settings", "expected"), CASES)
def test_each_method_by_hand(rewards, method, settings, expected):
    assert advantages(rewards, method, **settings) == pytest.approx(expected, rel=3e-6)  # an epsilon of 1e-6 is added


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


@pytest.mark.parametrize(("weights", "texts", "by_reward", "by_correctness"), [
    ({"correct": 1.0, "overlong": 0.5}, ["#### 1", "#### 2", "and so on " * 9 + "#### 3"], False, True),
    ({"correct": 1.0, "format": 0.1}, ["#### 1", "#### 2", "three"], False, True),
    ({"correct": 1.0, "format": 0.1}, ["#### 18", "#### 2", "three"], False, False),
    ({"correct": 1.0, "overlong": 0.5}, ["#### 18", "#### 18", "and so on " * 9 + "#### 18"], False, True),
    ({"correct": 0.0, "format": 0.1}, ["#### 18", "#### 2", "#### 3"], True, True),
])  # fmt: skip
def test_a_group_is_dead_by_reward_or_by_correctness(weights, texts, by_reward, by_correctness):
    prompt = Prompt(Problem("p", "q", "18"), "q", (5,))
    completions = [Completion((7,) * len(text), (-0.5,) * len(text), text, False) for text in texts]
    for by, dead in (("reward", by_reward), ("correct", by_correctness)):
        settings = [f"reward.weights={json.dumps(weights)}", f"rollout.dead_by={by}", "rollout.max_new_tokens=99"]
        scorer = make_verifier(resolve("nano", None, settings), NanoTask())
        assert scorer.score(prompt, completions).is_dead is dead


def shaped_group(right, shaping):
    """Answers that earn 1 for being right, and `shaping` beside that."""
    scores = [Score(float(one) + more, {}, None, None, one, one, more) for one, more in zip(right, shaping)]
    return replace(group([0.0] * len(right)), scores=tuple(scores))


def of_shaped(right, shaping, *settings):
    config = resolve("nano", None, ["reward.weights={correct: 1, length: 0.1}", *settings])
    return advantage.of_group(shaped_group(right, shaping), config)


def test_shaping_is_not_divided_by_the_deviation_of_the_group():
    # 0.05 - 0.05 / 8 = 0.04375, and 0.04375 / 0.01654 = 2.6458 where the whole reward is divided
    for right in (True, False):
        alone = of_shaped([right] * 8, [0.05] + [0.0] * 7)
        assert alone == pytest.approx([0.04375] + [-0.00625] * 7, abs=1e-9)
    assert of_shaped([True] * 8, [0.05] + [0.0] * 7, "reward.gate=false")[0] == pytest.approx(2.6458, rel=1e-4)
    # beside right answers: 1 and -1 from those, and half of 0.1 more or less from shaping
    mixed = of_shaped([True, True, False, False], [0.1, 0, 0.1, 0])
    assert mixed == pytest.approx([1.05, 0.95, -0.95, -1.05], rel=1e-5)


def test_shaping_is_compared_with_that_of_answers_that_have_a_reward():
    shaped = shaped_group([False] * 4, [0.1, 0.1, 0, 0])
    ungraded = replace(shaped, scores=(*shaped.scores, Score(None, {}, None, None, False, False)))
    config = resolve("nano", None, ["reward.weights={correct: 1, length: 0.1}"])
    assert advantage.of_group(ungraded, config) == pytest.approx([0.05, 0.05, -0.05, -0.05, None])


def test_shaping_is_measured_in_what_a_right_answer_earns():
    four = of_shaped([False] * 4, [0.4, 0, 0, 0], "reward.weights={correct: 4, length: 0.4}")
    assert four == pytest.approx(of_shaped([False] * 4, [0.1, 0, 0, 0]))
    # shaping of 0 to 100 gives no more than its own deviation, 50
    assert of_shaped([False] * 4, [100, 100, 0, 0]) == pytest.approx([1, 1, -1, -1])


UNGATED = ["reward.weights={correct: 0, format: 1}"], ["algorithm.advantage=dr_grpo"], ["reward.gate=false"]
UNGATED += (["task.name=records", "task.path=x", "task.answer=none"],)  # nothing is known to be right


@pytest.mark.parametrize("settings", UNGATED)
def test_the_whole_reward_is_one_where_being_right_is_not_paid_or_nothing_is_divided(settings):
    shaped = ["reward.weights={correct: 1, format: 0.1}"]
    assert resolve("nano", None, shaped).gates_shaping
    assert not resolve("nano", None, [*shaped, *settings]).gates_shaping


@pytest.mark.parametrize("preset", names_in(PRESETS))
def test_no_preset_lets_shaping_alone_make_a_large_advantage(preset):
    """Any of its terms may be earned by some answers of a group that is all right or all wrong."""
    config = resolve(preset)
    size, terms = config.rollout.group_size, list(config.shaping.values())
    for right, count in product((True, False), range(size)):
        for earned in product((0, 1), repeat=len(terms)):
            most = sum(weight for weight, is_earned in zip(terms, earned) if is_earned)
            scored = shaped_group([right] * size, [most] * count + [0.0] * (size - count))
            assert max(map(abs, advantage.of_group(scored, config))) < 0.2


def test_the_share_of_the_advantages_that_shaping_decides():
    config = resolve("nano", None, ["reward.weights={correct: 1, length: 0.1}"])
    groups = [shaped_group([True, True, False, False], [0.1, 0, 0.1, 0]), shaped_group([False] * 4, [0.1, 0.1, 0, 0])]
    advantages = [advantage.of_group(one, config) for one in groups]
    # 0.05 in each of 8 answers, of 4 x 1 and 4 x 0.05
    moved, size = advantage.decided_by_shaping(groups, advantages, config, 0.0)
    assert (moved, size) == pytest.approx((0.4, 4.2), rel=1e-4)
