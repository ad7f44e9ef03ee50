"""Shares, intervals, pass@k and the paired test, against textbooks, enumeration and simulation."""

import random
from itertools import combinations
from statistics import fmean, variance

import pytest

from trainer import stats
from trainer.watch.measure import REWARD

# Newcombe, Statistics in Medicine 17 (1998), table I, method 3: the score interval without continuity correction.
NEWCOMBE = [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]


@pytest.mark.parametrize(("successes", "trials", "low", "high"), NEWCOMBE)
def test_wilson_is_that_of_the_textbook(successes, trials, low, high):
    assert stats.wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)
    assert all(0 <= low < high <= 1 for low, high in (stats.wilson(0, trials), stats.wilson(trials, trials)))


INDEPENDENT = [([1, 0, 0, 1, 1], 1, (3, 5)), ([0.0] * 10, 8, (0, 10)), ([1.0] * 10, 8, (10, 10))]
INDEPENDENT += [([1.0, 0.0, 0.0], 8, (1, 3))]  # answers to a problem are all alike, and worth one
INDEPENDENT += [([0.5] * 10, 8, (40, 80))]  # answers do not depend on the problem, so all of them count


@pytest.mark.parametrize(("values", "answers_each", "independent"), INDEPENDENT)
def test_an_interval_counts_independent_answers(values, answers_each, independent):
    assert stats.share_of(values, answers_each)[1:] == pytest.approx(stats.wilson(*independent))


def shares_drawn(random_numbers: random.Random, problems: int, answers: int) -> list[float]:
    """The share of right answers of each problem; problems are easy or hard, so answers to one are alike."""
    chances = [random_numbers.betavariate(0.4, 0.6) for _ in range(problems)]  # 0.4 on average
    return [fmean(random_numbers.random() < chance for _ in range(answers)) for chance in chances]


def test_the_interval_of_several_answers_holds_the_truth_as_often_as_it_says():
    random_numbers = random.Random(0)
    samples = [shares_drawn(random_numbers, problems=60, answers=8) for _ in range(600)]
    intervals = [stats.share_of(shares, answers_each=8) for shares in samples]
    assert 0.92 < fmean(low < 0.4 < high for _, low, high in intervals) < 0.98
    as_if_independent = [stats.wilson(8 * sum(shares), 480) for shares in samples]
    assert fmean(low < 0.4 < high for low, high in as_if_independent) < 0.75


@pytest.mark.parametrize("answers", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(answers):
    for correct in range(answers + 1):
        for k in range(1, answers + 1):
            draws = list(combinations([True] * correct + [False] * (answers - correct), k))
            assert stats.pass_at(k, answers, correct) == pytest.approx(fmean(any(draw) for draw in draws))


@pytest.mark.parametrize(("gained", "lost", "p"), [
    (8, 0, 2 / 2**8), (1, 5, 2 * (1 + 6) / 2**6), (2, 10, 2 * (1 + 12 + 66) / 2**12), (3, 3, 1.0), (0, 0, 1.0),
])  # fmt: skip
def test_mcnemar_by_hand(gained, lost, p):
    before = [False] * gained + [True] * lost + [True, False]
    after = [not old for old in before[:-2]] + [True, False]
    assert stats.mcnemar(before, after) == (gained, lost, pytest.approx(p))
    with pytest.raises(ValueError, match="shorter"):
        stats.mcnemar(before, after[1:])


def test_a_small_gain_that_thousands_of_problems_show_is_not_rounded_to_nothing():
    assert stats.what_shows(20_000) == "in which a gain below 0.5 points may not show"


@pytest.mark.parametrize("problems", [20, 60, 64, 200, 256, 1000])
def test_the_interval_of_a_difference_agrees_with_the_exact_test(problems):
    """It leaves 0 out where p is below 0.05."""
    for flipped in range(min(60, problems)):
        for gained in range(flipped + 1):
            lost = flipped - gained
            _, _, p = stats.mcnemar([False] * gained + [True] * lost, [True] * gained + [False] * lost)
            difference = stats.paired_difference(gained, lost, problems)
            nearest = max(difference.low, -difference.high)  # above 0 if the interval leaves 0 out
            assert (nearest > 0) == (p < stats.SIGNIFICANT)


def test_the_interval_of_a_difference_holds_it_nineteen_times_of_twenty():
    draw = random.Random(0)
    held = 0
    for _ in range(2000):
        kinds = draw.choices(["gained", "lost", "same"], weights=[0.15, 0.05, 0.8], k=200)
        difference = stats.paired_difference(kinds.count("gained"), kinds.count("lost"), 200)
        held += difference.low <= 0.1 <= difference.high
    assert 0.945 < held / 2000 < 0.985


TABLE = [[1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1]]


def test_quantiles_are_those_of_the_tables_in_textbooks():
    for freedom, value in ((2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423)):
        assert stats.quantile(0.975, freedom) == pytest.approx(value, abs=1e-4)
        assert stats.two_sided(value, freedom) == pytest.approx(0.05, abs=1e-5)
    assert stats.quantile(0.8, 4) == pytest.approx(0.9410, abs=1e-4)


def test_the_variance_is_that_of_two_crossed_random_factors():
    """Worked out by hand: sums of squares 0.778 (2), 2.278 (5), 1.222 (10) of seeds, problems and what is left."""
    of_seeds, of_problems, rest = 0.7777778 / 2, 2.2777778 / 5, 1.2222222 / 10
    spread = of_problems + of_seeds - rest
    found, freedom = stats.effect(TABLE), spread**2 / (of_seeds**2 / 2 + of_problems**2 / 5)
    assert (found.value, found.error) == pytest.approx((11 / 18, (spread / 18) ** 0.5), rel=1e-6)
    assert found.freedom == pytest.approx(min(5, freedom), rel=1e-6)
    values = [1.0, -1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]  # of seeds that agree more than chance the problems alone count
    found = stats.effect([values] * 4)
    assert (found.error, found.freedom) == (pytest.approx((variance(values) / 8) ** 0.5), 7)


def test_what_a_study_detects_and_the_interval_of_a_mean_by_hand():
    found = stats.Effect(0.99, 0.05, 10, 0.01, 5)
    assert found.detectable() == pytest.approx(0.05 * (2.2281 + 0.8791), abs=1e-5)
    assert found.detectable(2) == pytest.approx(0.05 * (2.6338 + 0.8791), abs=1e-5)
    assert found.interval == (pytest.approx(0.99 - 0.05 * 2.2281, abs=1e-5), 1.0)
    mean, p = stats.mean_of([1.0, 2.0, 3.0, 4.0])  # its standard error is 0.6455
    assert (p, *mean) == pytest.approx((0.03047, 2.5, 2.5 - 3.1824 * 0.6455, 2.5 + 3.1824 * 0.6455), abs=1e-4)
    higher, lower, p, mean = REWARD.compared([0.0] * 4, [1.0] * 4)  # as if one change of 1 stood among zeros
    assert (higher, lower, p, *mean) == pytest.approx((4, 0, 0.02801, 1.0, 1 - 3.1824 / 4, 1 + 3.1824 / 4), abs=1e-4)
    assert REWARD.compared([], []) == (0, 0, 1.0, (0.0, 0.0, 0.0))


def test_seeds_count_among_the_degrees_of_freedom_even_where_they_add_nothing():
    """Three seeds whose means are nearly the same, while their answers differ from problem to problem."""
    rows = [[1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    of_seeds = 6 * variance(map(fmean, rows))
    of_problems = 3 * variance(map(fmean, zip(*rows, strict=True)))
    assert stats.effect(rows).freedom == pytest.approx(of_problems**2 / (of_seeds**2 / 2 + of_problems**2 / 5))


def test_arms_that_answer_alike_differ_by_less_than_some_problems_and_by_no_more():
    found = stats.effect([[0.0] * 100] * 3)
    assert (found.value, found.p) == (0.0, 1.0)
    assert found.interval == (pytest.approx(-0.0198, abs=1e-3), pytest.approx(0.0198, abs=1e-3))


def test_holms_correction():
    assert stats.corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.corrected([0.6, 0.9]) == [1.0, 1.0]


def drawn(rng: random.Random, gain: float, seeds: int = 5, problems: int = 400) -> list[list[float]]:
    return [[float(rng.random() < gain) for _ in range(problems)] for _ in range(seeds)]


def test_the_share_of_a_gain_has_an_interval_around_the_truth_or_none():
    rng = random.Random(3)
    value, low, high = stats.share_reached(drawn(rng, 0.2), drawn(rng, 0.4)) or (0, 0, 0)
    assert 0.35 < low < value < high < 0.65
    assert low < 0.5 < high
    assert stats.share_reached(drawn(rng, 0.2), drawn(rng, 0.001)) is None  # there is nothing to reach
    rng = random.Random(0)
    assert stats.share_reached(drawn(rng, 0.2), drawn(rng, 0.02)) is None  # only the upper end is too far away


def test_intervals_hold_what_they_promise():
    """bench/coverage.py has many designs; this one sees a mistake in the formula."""
    rng, inside = random.Random(1), 0
    for _ in range(200):
        shifts = [rng.gauss(0, 0.03) for _ in range(4)]
        easy = [rng.random() for _ in range(150)]
        rows = [[float(rng.random() < one + shift) - float(rng.random() < one) for one in easy] for shift in shifts]
        low, high = stats.effect(rows).interval
        inside += low <= 0.0 <= high
    assert 0.91 <= inside / 200 <= 0.99


def test_rewards_that_stay_rise_in_one_run_of_forty():
    draw = random.Random(0)
    risen = sum(stats.rise([draw.gauss(0, 1) for _ in range(30)], 10).low > 0 for _ in range(8000))
    assert risen / 8000 == pytest.approx(0.025, abs=0.005)
    assert stats.rise([1.0] * 30, 10) == (0.0, 0.0, 0.0)
    half = 4.302653 * (17 / 3) ** 0.5  # Welch's 2.2 degrees of freedom are taken as 2
    assert stats.rise([1, 2, 3, 5, 9, 13], 3) == pytest.approx((7, 7 - half, 7 + half), abs=1e-5)
