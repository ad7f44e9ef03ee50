"""Which problems are drawn: the same on every rank and in a resumed run, easy ones first, hopeless ones less often."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from tests.conftest import refuses
from trainer.config.resolve import resolve
from trainer.problem.curriculum import CURRICULA, BySolveRate, EasyFirst, difficulties, outcomes, solve_rates
from trainer.problem.task import draw
from trainer.ranks import distributed
from trainer.records import Completion, Problem, Prompt, Score, ScoredGroup
from trainer.rollout.collect import Rollouts

PROBLEMS = [Problem(f"p/{i}", f"question {i}", "1", extra={"level": i % 40}) for i in range(200)]


def ids(problems) -> list[str]:
    return [problem.id for problem in problems]


def group(problem: Problem, *rewards: float | None, lenient: bool = False) -> ScoredGroup:
    """Answers with these rewards. Those of 1 are right; `lenient` has all others right, too, for that reading."""
    scores = tuple(Score(one, {}, None, None, one == 1, one == 1 or lenient) for one in rewards)
    completions = (Completion((2,), (-0.1,), "", False),) * len(rewards)
    return ScoredGroup(Prompt(problem, "", (1,)), completions, scores)


@pytest.mark.parametrize("name", CURRICULA)
@pytest.mark.parametrize("count", [7, 200, 450])
def test_a_step_has_its_problems_and_follows_from_the_seed(name, count):
    one, same, other = (CURRICULA[name](PROBLEMS, count, seed, 10) for seed in (3, 3, 4))
    for step in range(4):
        drawn = ids(one.draw(step))
        assert len(drawn) == count
        assert max(Counter(drawn).values()) <= -(-count // 200) + (name != "solve_rate")
        assert drawn == ids(same.draw(step))
        assert drawn != ids(other.draw(step))


@pytest.mark.parametrize("name", CURRICULA)
def test_a_task_that_makes_up_its_problems_has_others_in_each_pass(name):
    def later(passes):
        return [replace(problem, id=f"{passes}/{problem.id}") for problem in PROBLEMS]

    curriculum = CURRICULA[name](PROBLEMS, 50, 0, 100, later)
    for step in (0, 3, 4, 11, 3, 400):  # four steps are a pass
        for drawn in (curriculum.draw(step), curriculum.spare(step, 1)):
            assert {problem.id.partition("/")[0] for problem in drawn} == {str(step // 4) if step > 3 else "p"}
    ordinary = CURRICULA[name](PROBLEMS, 50, 0, 100)
    assert ordinary.draw(3) == curriculum.draw(3)


def test_without_a_curriculum_every_problem_comes_once_in_a_pass():
    plain = CURRICULA["none"](PROBLEMS, 8, 0, 50)
    drawn = [problem for step in range(25) for problem in plain.draw(step)]
    assert (sorted(ids(drawn)), plain.draw(11)) == (sorted(ids(PROBLEMS)), draw(PROBLEMS, 11, 8, 0))
    plain.observe([("p/0", 0.0)])
    assert (plain.state(), plain.draw(11)) == ({}, draw(PROBLEMS, 11, 8, 0))


@pytest.mark.parametrize("name", CURRICULA)
def test_spare_problems_are_others_and_follow_from_the_seed_too(name):
    one, same = (CURRICULA[name](PROBLEMS, 8, 3, 10) for _ in range(2))
    spare = ids(one.spare(2, 1))
    assert len(set(spare)) == 8
    assert not set(spare) & set(ids(one.draw(2)))
    assert spare == ids(same.spare(2, 1)) != ids(one.spare(2, 2))

    assert len(CURRICULA[name](PROBLEMS[:5], 5, 0, 10).spare(0, 1)) == 5  # the same ones, as there are no others


def test_easy_problems_come_first_and_from_half_of_the_run_on_all():
    easy = EasyFirst(PROBLEMS, 10, 0, total_steps=100)
    hardest = [max(problem.extra["level"] for problem in easy.draw(step)) for step in range(100)]
    assert max(hardest[:2]) == 9  # the easiest quarter of 40 levels, and the first steps of its growth
    assert all(hardest[step] <= 10 + 30 * step / 50 for step in range(50))
    later = Counter(problem.extra["level"] // 10 for step in range(50, 100) for problem in easy.draw(step))
    assert all(80 < later[quarter] < 170 for quarter in range(4))
    assert max(problem.extra["level"] for problem in easy.spare(0, 1)) <= 9
    assert len(set(ids(EasyFirst(PROBLEMS, 60, 0, total_steps=100).draw(0)))) == 60  # more than the easiest quarter


def test_the_easy_problems_of_each_part_of_a_mixture_come_first():
    lines = [Problem(f"b/{n}", f"b{n}", "1", "\n" * n + "#### 1", part="b") for n in range(20)]
    alike = [Problem(f"c/{n}", f"c{n}", "1", part="c") for n in range(20)]
    easy = EasyFirst([*PROBLEMS, *lines, *alike], 10, 0, total_steps=100).pool(0)
    assert Counter(one.part for one in easy) == {"": 50, "b": 5, "c": 5}
    assert {one.solution.count("\n") for one in easy if one.part == "b"} == {*range(5)}


@pytest.mark.parametrize(("extras", "solutions", "expected"), [
    ([{"difficulty": "2.5"}, {"difficulty": -1}, {}], ["", "", ""], [2.5, -1.0, float("inf")]),
    ([{"level": "Level 5"}, {"level": "Level ?"}, {"level": 1}], ["", "", ""], [5.0, float("inf"), 1.0]),
    ([{"level": "level-1"}, {"level": "1e-05"}, {"level": "-2"}], ["", "", ""], [1.0, 1e-5, -2.0]),
    ([{"difficulty": "hard", "level": 2}, {"difficulty": "easy", "level": 1}], ["", ""], [2.0, 1.0]),
    ([{"level": "hard"}, {"level": "easy"}], ["1\n#### 3", "#### 1"], [1.0, 0.0]),
    ([{"steps": 3, "x": 1}, {"steps": 1}, {"steps": 2}], ["", "", ""], [3.0, 1.0, 2.0]),
    ([{}, {}, {}], ["1\n2\n#### 3", "#### 1", ""], [2.0, 0.0, float("inf")]),
])  # fmt: skip
def test_how_hard_a_problem_is(extras, solutions, expected):
    problems = [Problem("p", "q", "1", text, extra) for extra, text in zip(extras, solutions)]
    assert difficulties(problems) == expected


@pytest.mark.parametrize("extra", [{}, {"level": "hard"}, {"level": 3}])
def test_nothing_to_tell_easy_from_hard_is_answered(extra):
    with refuses("task.curriculum"):
        EasyFirst([Problem("p", "q", "1", "", extra)] * 3, 2, 0, 10)


def test_problems_solved_always_or_never_are_drawn_a_tenth_as_often():
    learned = BySolveRate(PROBLEMS, 4, 0, 1000)
    learned.observe([(problem.id, [0.0, 1.0, 0.5, 0.25][i % 4]) for i, problem in enumerate(PROBLEMS)])
    drawn = Counter(int(problem.id[2:]) % 4 for step in range(1000) for problem in learned.draw(step))
    for hopeless in (0, 1):
        assert 0.07 < drawn[hopeless] / drawn[2] < 0.14
    assert 0.68 < drawn[3] / drawn[2] < 0.88  # 0.1 + 0.9 * 0.75


def test_problems_never_seen_weigh_as_much_as_the_best_and_the_newest_groups_count_most():
    learned = BySolveRate(PROBLEMS, 4, 0, 10)
    learned.observe([("p/1", 0.5), ("p/2", 0.0)])
    assert [learned.weight(f"p/{index}") for index in range(3)] == pytest.approx([1.0, 1.0, 0.1])
    learned = BySolveRate(PROBLEMS, 4, 0, 10)
    for rate in (1.0, 0.0, 0.0, 1.0):
        learned.observe([("p/1", rate)])
    assert learned.state() == {"solve_rates": {"p/1": 0.625}}  # 1, then a half of it, a quarter, and halfway back to 1


def test_rates_believe_the_parse_that_the_reward_believes():
    groups = [group(PROBLEMS[0], 1, 0, 0, 0, lenient=True), group(PROBLEMS[1], 0, 0)]
    assert solve_rates(outcomes(groups, "correct_strict"), scales=False) == [("p/0", 0.25), ("p/1", 0.0)]
    assert solve_rates(outcomes(groups, "correct_lenient"), scales=False) == [("p/0", 1.0), ("p/1", 0.0)]


def test_without_gold_answers_the_rate_is_the_mean_reward_between_the_worst_and_the_best():
    rewards = [(-2.0, 8.0), (8.0, None), (3.0, -2.0), (None,)]
    groups = [group(problem, *of_problem) for problem, of_problem in zip(PROBLEMS, rewards)]
    rates = solve_rates(outcomes(groups, "reward"), scales=True)
    assert rates == [("p/0", 0.5), ("p/1", 1.0), ("p/2", 0.25)]
    assert solve_rates(outcomes(groups[1:2], "reward"), scales=True) == [("p/1", 0.0)]  # all alike: nothing to learn


def steps(curriculum, first: int, last: int) -> list[list[str]]:
    """Draw for a made-up model that gets better."""
    drawn = []
    for step in range(first, last):
        drawn.append(ids(curriculum.draw(step)))
        curriculum.observe([(name, (int(name[2:]) * 7 + step) % 9 / 8) for name in drawn[-1]])
    return drawn


@pytest.mark.parametrize("name", CURRICULA)
def test_a_resumed_run_draws_what_the_undisturbed_one_drew(name):
    whole, first, resumed = (CURRICULA[name](PROBLEMS, 8, 5, 40) for _ in range(3))
    undisturbed, begun = steps(whole, 0, 40), steps(first, 0, 17)
    resumed.load(json.loads(json.dumps(first.state())))
    assert begun + steps(resumed, 17, 40) == undisturbed
    assert resumed.state() == first.state() or name == "solve_rate"


def test_ranks_that_see_different_groups_draw_the_same_problems(monkeypatch):
    """Two ranks in turns: each tells the loop its own groups, and `gather` brings those of both."""
    config = resolve("nano", None, ["task.curriculum=solve_rate"])

    ranks = [Rollouts(config, BySolveRate(PROBLEMS, 8, 0, 30), None, None, None, None) for _ in range(2)]
    for step in range(30):
        drawn = [rank.curriculum.draw(step) for rank in ranks]
        assert drawn[0] == drawn[1]
        mine = [[group(p, step % 2 == 0, int(p.id[2:]) % 3 == 0) for p in drawn[0][rank::2]] for rank in (0, 1)]
        seen = [outcomes(groups, "correct_strict") for groups in mine]
        for rank, groups in zip(ranks, mine):
            monkeypatch.setattr(distributed, "gather", lambda own, all_of=seen: all_of if own in all_of else None)
            rank._observe(groups)
    assert ranks[0].curriculum.state() == ranks[1].curriculum.state()
    assert len(ranks[0].curriculum.rates) > 100
