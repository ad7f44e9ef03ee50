"""The controls of an experiment: what they change, and what they leave."""

from dataclasses import replace

import pytest

from tests.conftest import refuses, write_lines
from tests.rewarding import PROMPT, answer, scorer_of
from trainer.config.resolve import resolve
from trainer.plan.read_data import training_of
from trainer.problem.task import make_task, training_problems
from trainer.records import Problem, ScoredGroup
from trainer.reward import control_rewards

SCORED = scorer_of().score(PROMPT, [answer(f"#### {number}") for number in (12, 12, 12, 3, 4, 5, 6, 7)])


def rewards(name: str, seed: int, group: ScoredGroup = SCORED) -> tuple[float | None, ...]:
    return control_rewards.replace_rewards(group, name, seed).rewards_G


def test_without_a_control_a_group_is_what_it_was():
    assert control_rewards.replace_rewards(SCORED, "none", 0) is SCORED
    assert control_rewards.replace_rewards(SCORED, "shuffled_gold", 0) is SCORED


def test_random_rewards_follow_from_the_seed_and_the_problem_and_are_right_half_of_the_time():
    assert rewards("random", 5) == rewards("random", 5)
    again = replace(SCORED, prompt=replace(PROMPT, repeat=1))
    other = replace(SCORED, prompt=replace(PROMPT, problem=replace(PROMPT.problem, id="another")))
    assert len({rewards("random", 6), *(rewards("random", 5, one) for one in (SCORED, again, other))}) == 4
    drawn = [reward for seed in range(200) for reward in rewards("random", seed)]
    assert ({*drawn}, sum(drawn) / len(drawn)) == ({0.0, 1.0}, pytest.approx(0.5, abs=0.06))


def test_shuffled_advantages_are_those_of_the_group_in_another_order():
    found = {rewards("shuffled_advantages", seed) for seed in range(50)}
    assert all(sorted(one) == sorted(SCORED.rewards_G) for one in found)
    assert len(found) > 20
    firsts = [rewards("shuffled_advantages", seed)[0] for seed in range(400)]
    assert sum(firsts) / 400 == pytest.approx(3 / 8, abs=0.08)  # the first answer is right no more often than others


def test_shaping_goes_with_its_reward_and_chance_has_none():
    scores = [replace(one, shaping=float(index)) for index, one in enumerate(SCORED.scores)]
    shaped = replace(SCORED, scores=tuple(scores))
    moved = control_rewards.replace_rewards(shaped, "shuffled_advantages", 0)
    pairs = [[(score.reward, score.shaping) for score in one.scores] for one in (shaped, moved)]
    assert sorted(pairs[0]) == sorted(pairs[1])
    assert pairs[0] != pairs[1]
    assert {score.shaping for score in control_rewards.replace_rewards(shaped, "random", 0).scores} == {0.0}


def test_what_is_reported_of_an_answer_stays_true():
    changed = control_rewards.replace_rewards(SCORED, "random", 1)
    assert [one.correct_strict for one in changed.scores] == [one.correct_strict for one in SCORED.scores]
    assert [one.components for one in changed.scores] == [one.components for one in SCORED.scores]


def test_shuffled_golds_are_those_of_other_problems_and_the_held_out_ones_stay():
    config = resolve("nano", None, ["reward.control=shuffled_gold"])
    task = make_task(config.task)
    problems = training_problems(task, config.task, 0)
    changed = control_rewards.shuffle_golds(problems, "shuffled_gold", config.run.seed, ("answer",))
    assert sorted(one.gold for one in changed) == sorted(one.gold for one in problems)
    assert [one.question for one in changed] == [one.question for one in problems]
    same = sum(one.gold == other.gold for one, other in zip(changed, problems)) / len(problems)
    assert same < 0.1  # by chance: there are about a hundred answers
    assert control_rewards.shuffle_golds(problems, "none", 0, ()) == problems


def test_a_function_reads_shuffled_golds_in_the_columns_of_the_answer_too():
    problems = [Problem(str(n), f"{n}?", str(n), f"#### {n}", {"Zahl": n, "level": n}) for n in range(50)]
    changed = control_rewards.shuffle_golds(problems, "shuffled_gold", 0, ("Zahl", "solution"))
    assert [one.extra["level"] for one in changed] == [*range(50)]
    assert all(one.gold == str(one.extra["Zahl"]) == one.extra["solution"].removeprefix("#### ") for one in changed)
    assert [one.solution for one in changed] == [one.solution for one in problems]  # which a warm-up teaches
    with refuses("reward.control", names="no gold answers"):
        control_rewards.shuffle_golds([replace(one, gold="") for one in problems], "shuffled_gold", 0, ())


@pytest.mark.parametrize("column", ["answer", "Zahl"])
def test_the_columns_that_are_named_as_answer_and_solution_are_shuffled(column, tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": f"{n}?", column: str(n), "why": f"#### {n}"} for n in range(50)])
    settings = [f"task.path={tmp_path}/a.jsonl", f"task.answer={column}", "task.solution=why"]
    config = resolve("nano", None, ["reward.control=shuffled_gold", "task.name=records", *settings])
    for one in training_of(make_task(config.task), config):
        read = [one.extra[name].removeprefix("#### ") for name in (column, "why", "solution")]
        assert read == [one.gold] * 3


def test_a_generator_scores_the_answers_of_other_problems():
    config = resolve("nano", None, ["task.name=reasoning_gym:gcd", "task.gym={size: 20}"])
    task = make_task(config.task)
    problems = training_of(task, config.changed({"reward.control": "shuffled_gold"}))
    assert [task.score(one, one.gold) for one in problems] == [1.0] * len(problems)
