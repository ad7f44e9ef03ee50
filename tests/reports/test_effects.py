"""The statistics of a study, against numbers that were worked out in another way."""

import random
from statistics import fmean, variance

import pytest

from trainer.estimates import corrected, effect, is_enough, quantile, share_reached, two_sided

TABLE = [[1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 1, 0], [1, 1, 1, 0, 1, 1]]


def test_quantiles_are_those_of_the_tables_in_textbooks():
    for freedom, value in ((2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423)):
        assert quantile(0.975, freedom) == pytest.approx(value, abs=1e-4)
        assert two_sided(value, freedom) == pytest.approx(0.05, abs=1e-5)
    assert quantile(0.8, 4) == pytest.approx(0.9410, abs=1e-4)


def test_the_variance_is_that_of_two_crossed_random_factors():
    """Worked out by hand: sums of squares 0.778 (2), 2.278 (5), 1.222 (10) of seeds, problems and what is left."""
    of_seeds, of_problems, rest = 0.7777778 / 2, 2.2777778 / 5, 1.2222222 / 10
    spread = of_problems + of_seeds - rest
    found = effect(TABLE)
    assert found.value == pytest.approx(11 / 18)
    assert found.error == pytest.approx((spread / 18) ** 0.5, rel=1e-6)
    assert found.freedom == pytest.approx(min(5, spread**2 / (of_seeds**2 / 2 + of_problems**2 / 5)), rel=1e-6)


def test_seeds_that_agree_more_than_chance_leave_the_problems_alone_to_count():
    rows = [[1.0, -1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0]] * 4
    found = effect(rows)
    values = rows[0]
    plain = (sum((one - fmean(values)) ** 2 for one in values) / 7 / 8) ** 0.5
    assert (found.error, found.freedom) == (pytest.approx(plain), 7)


def test_seeds_count_among_the_degrees_of_freedom_even_where_they_add_nothing():
    """Three seeds whose means are nearly the same, while their answers differ from problem to problem."""
    rows = [[1.0, 0.0, 1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]]
    found = effect(rows)
    means, columns = [fmean(row) for row in rows], [fmean(column) for column in zip(*rows, strict=True)]
    of_seeds, of_problems = 6 * variance(means), 3 * variance(columns)
    assert found.freedom == pytest.approx(of_problems**2 / (of_seeds**2 / 2 + of_problems**2 / 5))


def test_arms_that_answer_alike_differ_by_less_than_some_problems_and_by_no_more():
    found = effect([[0.0] * 100] * 3)
    assert (found.value, found.p) == (0.0, 1.0)
    assert found.interval == (pytest.approx(-0.0198, abs=1e-3), pytest.approx(0.0198, abs=1e-3))


def test_few_seeds_or_a_single_problem_are_not_judged():
    tables = [[[1.0, 0.0]] * 3, [[1.0, 0.0]] * 2, [[1.0]] * 5]
    assert [is_enough(table) for table in tables] == [True, False, False]


def test_holms_correction():
    assert corrected([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert corrected([0.6, 0.9]) == [1.0, 1.0]


def drawn(rng: random.Random, gain: float, seeds: int = 5, problems: int = 400) -> list[list[float]]:
    return [[float(rng.random() < gain) for _ in range(problems)] for _ in range(seeds)]


def test_the_share_of_a_gain_has_an_interval_around_the_truth_or_none():
    rng = random.Random(3)
    value, low, high = share_reached(drawn(rng, 0.2), drawn(rng, 0.4)) or (0, 0, 0)
    assert 0.35 < low < value < high < 0.65
    assert low < 0.5 < high
    assert share_reached(drawn(rng, 0.2), drawn(rng, 0.001)) is None  # there is nothing to reach


def test_intervals_hold_what_they_promise():
    """bench/coverage.py has many designs; this one sees a mistake in the formula."""
    rng, inside = random.Random(1), 0
    for _ in range(200):
        shifts = [rng.gauss(0, 0.03) for _ in range(4)]
        easy = [rng.random() for _ in range(150)]
        rows = [[float(rng.random() < one + shift) - float(rng.random() < one) for one in easy] for shift in shifts]
        low, high = effect(rows).interval
        inside += low <= 0.0 <= high
    assert 0.91 <= inside / 200 <= 0.99
