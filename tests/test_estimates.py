"""Shares, intervals, pass@k and the paired test, against textbooks, enumeration and simulation."""

import random
from itertools import combinations
from statistics import fmean

import pytest

from trainer.estimates import SIGNIFICANT, mcnemar, paired_difference, pass_at, share_of, wilson

# Newcombe, Statistics in Medicine 17 (1998), table I, method 3: the score interval without continuity correction.
NEWCOMBE = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]


@pytest.mark.parametrize(("successes", "trials", "low", "high"), NEWCOMBE)
def test_wilson_is_that_of_the_textbook(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_mirrors_successes_and_failures():
    low, high = wilson(17, 20)
    assert wilson(3, 20) == pytest.approx((1 - high, 1 - low))


def test_wilson_stays_between_0_and_1():
    assert all(0 <= low < high <= 1 for low, high in (wilson(0, n) for n in range(1, 50)))
    assert all(0 <= low < high <= 1 for low, high in (wilson(n, n) for n in range(1, 50)))


def test_one_answer_to_each_problem_has_the_wilson_interval():
    assert share_of([1, 0, 0, 1, 1])[1:] == pytest.approx(wilson(3, 5))


def test_answers_that_are_all_alike_are_worth_one():
    assert share_of([1.0, 0.0, 0.0], answers_each=8) == pytest.approx(share_of([1, 0, 0]))


def test_answers_that_do_not_depend_on_the_problem_all_count():
    assert share_of([0.5] * 10, answers_each=8)[1:] == pytest.approx(wilson(40, 80))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_where_nothing_differs_problems_are_counted(value):
    assert share_of([value] * 10, answers_each=8)[1:] == pytest.approx(wilson(10 * value, 10))


def shares_drawn(random_numbers: random.Random, problems: int, answers: int) -> list[float]:
    """The share of right answers of each problem; problems are easy or hard, so answers to one are alike."""
    chances = [random_numbers.betavariate(0.4, 0.6) for _ in range(problems)]  # 0.4 on average
    return [fmean(random_numbers.random() < chance for _ in range(answers)) for chance in chances]


def test_the_interval_of_several_answers_holds_the_truth_as_often_as_it_says():
    random_numbers = random.Random(0)
    samples = [shares_drawn(random_numbers, problems=60, answers=8) for _ in range(600)]
    intervals = [share_of(shares, answers_each=8) for shares in samples]
    assert 0.92 < fmean(low < 0.4 < high for _, low, high in intervals) < 0.98
    as_if_independent = [wilson(8 * sum(shares), 480) for shares in samples]
    assert fmean(low < 0.4 < high for low, high in as_if_independent) < 0.75


@pytest.mark.parametrize("answers", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(answers):
    for correct in range(answers + 1):
        for k in range(1, answers + 1):
            draws = list(combinations([True] * correct + [False] * (answers - correct), k))
            assert pass_at(k, answers, correct) == pytest.approx(fmean(any(draw) for draw in draws))


def flips(gained: int, lost: int) -> tuple[list[bool], list[bool]]:
    before = [False] * gained + [True] * lost + [True, False]
    return before, [not old for old in before[:-2]] + [True, False]


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [(8, 0, 2 / 2**8), (1, 5, 2 * (1 + 6) / 2**6), (2, 10, 2 * (1 + 12 + 66) / 2**12), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_mcnemar_by_hand(gained, lost, p):
    assert mcnemar(*flips(gained, lost)) == (gained, lost, pytest.approx(p))


def test_mcnemar_wants_the_same_problems():
    with pytest.raises(ValueError, match="shorter"):
        mcnemar([True, False], [True])


@pytest.mark.parametrize("problems", [60, 64, 200, 256, 1000])
def test_the_interval_of_a_difference_agrees_with_the_exact_test(problems):
    """It leaves 0 out where p is below 0.05."""
    for flipped in range(60):
        for gained in range(flipped + 1):
            lost = flipped - gained
            _, _, p = mcnemar([False] * gained + [True] * lost, [True] * gained + [False] * lost)
            difference = paired_difference(gained, lost, problems)
            nearest = max(difference.low, -difference.high)  # above 0 if the interval leaves 0 out
            assert (nearest > 0) == (p < SIGNIFICANT)


def test_the_interval_of_a_difference_holds_it_nineteen_times_of_twenty():
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        kinds = draw.choices(["gained", "lost", "same"], weights=[0.15, 0.05, 0.8], k=200)
        difference = paired_difference(kinds.count("gained"), kinds.count("lost"), 200)
        held += difference.low <= 0.1 <= difference.high
    assert 0.945 < held / 2000 < 0.985
