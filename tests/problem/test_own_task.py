"""Tasks that are named in a setting: a function of a user's file, a generator of reasoning_gym, a mixture."""

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

import pytest

from tests.conftest import ROOT, program, refuses, said_by, write_lines
from trainer.config.resolve import resolve
from trainer.config.settings import TaskSettings
from trainer.problem import generators
from trainer.problem.environment import environments_of
from trainer.problem.prompts import MARKS, answer_style
from trainer.problem.task import evaluation_problems, make_task, normalised, training_problems
from trainer.records import Completion, Problem, Prompt
from trainer.reward.make import make_scorer, make_verifier
from trainer.run_folder.provenance import checksums
from trainer.watch.answer_metrics import tally_groups
from trainer.watch.measure import LENIENT, STRICT
from trainer.watch.tally import Tally


def configured(*settings: str):
    return resolve("nano", None, settings)


def made(*settings: str):
    config = configured(*settings)
    return config, make_task(config.task)


def task_of(*settings: str):
    return made(*settings)[1]


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a task file, and returns the setting that names it."""

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"task.name={tmp_path}/mine.py:build"

    return write


def graded(config, problem, *texts):
    """Return what each text is worth, and the answer that was read."""
    task = make_task(config.task)
    answers = ((Prompt(problem, "", ()), Completion((), (), text, truncated=False)) for text in texts)
    scores = make_verifier(config, task).scores(answers)
    return [(score.reward, score.strict, score.correct_strict, score.correct_lenient) for score in scores]


SUMS = """
class Sums:
    def train(self):
        return [{"question": f"{n} + 1?", "answer": n + 1, "n": n} for n in range(40)]
def build(settings):
    return Sums()
"""


def test_records_of_a_function_become_problems_and_a_share_is_held_out(written):
    config, task = made(written(SUMS))
    train, test = training_problems(task, config.task, 0), evaluation_problems(task, 99)
    assert (len(train), len(test), task.name) == (28, 12, "mine")
    assert sorted(int(problem.gold) for problem in [*train, *test]) == list(range(1, 41))
    assert all(problem.extra["n"] + 1 == int(problem.gold) for problem in train)
    assert graded(config, train[0], f"#### {train[0].gold}", "#### x")[0][0] == 1.0
    task = task_of(written(SUMS + "\nSums.test = lambda self: [{'question': '1 + 1?', 'answer': 2}]\n"))
    assert [problem.gold for problem in task.test()] == ["2"]
    assert len(task.train()) == 39  # without the question that is held out


OWN = """
    prompt_style = "chat"
    def read(self, problem, text):
        return text.rpartition("=")[2].strip() or None
    def score(self, problem, answer):
        return {"right": 1.0, "nearly": 0.4}.get(answer, 0.0)
"""
READS = SUMS.replace("def build", f"{OWN}def build")


def test_it_may_read_and_score_answers_in_its_own_way(written):
    config = configured(written(READS))
    problem = make_task(config.task).train()[0]
    right, nearly, nothing, wrong = graded(config, problem, "x = right", "x = nearly", "x = ", "wrong")
    assert (right, nearly) == ((1.0, "right", True, True), (0.4, "nearly", False, False))
    assert (nothing, wrong) == ((0.0, None, False, False), (0.0, "wrong", False, False))
    assert task_of(written(READS.replace('"answer": n + 1, ', ""))).train()[0].gold == ""  # which it does not need


def test_what_it_reads_may_have_a_decimal_comma(written):
    reads = READS.replace('"answer": n + 1', '"answer": f"{n},5"') + "del Sums.score\n"
    config = configured(written(reads), "task.decimal=comma")
    problem = make_task(config.task).train()[0]
    answers = graded(config, problem, f"x = {problem.gold}", f"x = {problem.gold.replace('.', ',')}", "x = 99,5")
    assert [correct for _, _, correct, _ in answers] == [True, True, False]


def test_answers_are_scored_one_at_a_time_also_where_groups_are_scored_at_once(written):
    count = "self.most = max(getattr(self, 'most', 0), self.running)"
    score = f"self.running = getattr(self, 'running', 0) + 1; {count}; time.sleep(0.01); self.running -= 1; return 1.0"
    body = SUMS.replace("def build", f"    def score(self, problem, answer):\n        {score}\ndef build")
    task = task_of(written(f"import time\n{body}"))
    with ThreadPoolExecutor(4) as four:
        list(four.map(lambda _: task.score(task.train()[0], "1"), range(12)))
    assert task.own.most == 1


@pytest.mark.parametrize("answer", ["numpy.int64(n + 1)", "numpy.float32(n + 1)", "Fraction(n + 1)", "Decimal(n + 1)"])
def test_an_answer_may_be_any_kind_of_number(written, answer):
    text = f"import numpy\nfrom decimal import Decimal\nfrom fractions import Fraction\n{SUMS}"
    problem = task_of(written(text.replace("n + 1, ", f"{answer}, "))).train()[0]
    assert float(problem.gold) == problem.extra["n"] + 1


def test_the_example_is_a_task():
    config = configured(f"task.name={ROOT}/examples/task.py:build")
    problem = make_task(config.task).train()[0]
    near = str(int(problem.gold) + 2)
    worths = [one[0] for one in graded(config, problem, f"#### {problem.gold}", f"#### {near}", "none")]
    assert worths == [1.0, 0.48, 0.0]


@pytest.fixture(autouse=True)
def few_held_out(monkeypatch):
    monkeypatch.setattr(generators, "HELD_OUT", 8)


def test_a_generator_makes_problems_and_scores_answers():
    config, task = made("task.name=reasoning_gym:chain_sum", "task.gym={size: 40, min_terms: 2, max_terms: 3}")
    train, test = task.train(), task.test()
    asked, held_out = ({normalised(problem.question) for problem in part} for part in (train, test))
    assert 30 < len(train) == len(asked) <= 40
    assert not asked & held_out
    assert train == make_task(config.task).train()
    gold = train[0].gold
    marked = [f"<answer>{gold}</answer>", f"<answer>{gold} or so</answer>", gold, f"<think><answer>{gold}</answer>"]
    right, near, unmarked, thought = graded(config, train[0], *marked)
    assert right == (1.0, gold, True, True)
    assert (near[0], near[2]) == (0.0, False)
    assert (unmarked[0], unmarked[3], thought[0]) == (0.0, False, 0.0)


@pytest.mark.parametrize("names", ["task.name=reasoning_gym:{0}", "task.mix={{nano: 1, reasoning_gym:{0}: 1}}"])
def test_a_nearly_right_answer_is_paid_on_demand_only(names):
    settings = names.format("word_sequence_reversal"), "task.gym={size: 8, min_words: 20, max_words: 25}"
    config, task = made(*settings)
    problem = next(problem for problem in task.train() if problem.part != "nano")
    answer = f"<answer>{problem.gold}s</answer>"
    assert graded(config, problem, answer)[0][0] == 0.0
    assert 0.9 < graded(configured(*settings, "task.gym.partial=true"), problem, answer)[0][0] < 1


@pytest.mark.parametrize("name", ["task.name=reasoning_gym:gcd", "task.mix={nano: 1, reasoning_gym:gcd: 1}"])
def test_later_passes_have_other_problems(name):
    config, task = made(name, "task.gym.size=40")
    passes = [task, task.later(1), task.later(2), make_task(config.task).later(2)]
    first, second, third, same = (list(one.train()) for one in passes)
    assert third == same
    new = [problem for problem in [*first, *second, *third, *task.test()] if problem.part != "nano"]
    assert len({problem.id for problem in new}) == len(new)
    assert len({problem.question for problem in new}) > 0.9 * len(new)
    problem = next(problem for problem in third if problem.part != "nano")
    assert graded(config, problem, f"<answer>{problem.gold}</answer>")[0][0] == 1.0


def test_a_small_size_makes_few_held_out_problems(monkeypatch):
    """Slow generators need more than a second for each."""
    monkeypatch.setattr(generators, "HELD_OUT", 1000)
    assert 0 < len(task_of("task.name=reasoning_gym:gcd", "task.gym={size: 40}").test()) <= 40


def test_levels_of_difficulty_are_for_a_curriculum():
    task = task_of("task.name=reasoning_gym:chain_sum", "task.gym={size: 40}", "task.curriculum=difficulty")
    lengths = {level: [] for level in range(4)}
    for problem in task.train():
        lengths[problem.extra["difficulty"]].append(len(problem.question))
    assert fmean(lengths[3]) > fmean(lengths[0])


@pytest.mark.parametrize("name", ["aiw", "word_sorting"])
def test_levels_leave_out_parameters_that_are_no_longer_themselves_as_json(name):
    task = task_of(f"task.name=reasoning_gym:{name}", "task.gym={size: 40}", "task.curriculum=difficulty")
    assert {problem.extra["difficulty"] for problem in task.train()} == {0, 1, 2, 3}


@pytest.mark.parametrize(("generator", "attack"), [
    ("spiral_matrix", "[open({owned!r}, 'w').close()]"),  # its scoring calls eval on the answer
    ("countdown", "open({owned!r}, 'w')"),  # and this one sympy's parser, which does the same
])  # fmt: skip
def test_an_answer_that_is_evaluated_does_no_harm(tmp_path, generator, attack):
    config = configured(f"task.name=reasoning_gym:{generator}", "task.gym.size=8")
    problem = make_task(config.task).train()[0]
    owned = tmp_path / "owned"
    attacks = (f"<answer>{attack.format(owned=str(owned))}</answer>", f"<answer>{problem.gold}</answer>")
    attacked, right = graded(config, problem, *attacks)
    assert (right[0], owned.exists()) == (1.0, False)
    assert attacked[0] < 0.1


def test_without_reasoning_gym_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with refuses("task.name", names="pip install -e '.[gym]'"):
        task_of("task.name=reasoning_gym:gcd")


def test_a_mixture_asks_for_the_answer_where_it_is_looked_for():
    """Both parts have the prompt style chat, and their answers stand elsewhere."""
    mixed = task_of("task.mix={nano: 1, addition: 1}")
    assert (mixed.prompt_style, mixed.answer_style) == ("tags", "tags")
    assert mixed.part(Problem("asked", "1 + 1?", "")) is mixed, "what a person asks is of no part"
    assert task_of("task.mix={nano: 1, gsm8k: 1}").answer_style == "gsm8k"  # where both have it with prompt.style=chat


MIX = "task.mix={nano: 1, reasoning_gym:gcd: 3}"


def test_a_mixture_has_its_parts_in_proportion():
    config, task = made(MIX, "task.gym.size=60")
    assert (config.task.name, task.prompt_style, task.answer_style) == ("mix", "tags", "tags")
    counts = Counter(problem.part for problem in task.train())
    assert abs(counts["reasoning_gym:gcd"] - 3 * counts["nano"]) <= 2
    assert config == configured(f"task.mix={json.dumps(config.task.mix)}", "task.name=mix", "task.gym.size=60")


SEEN = "seen = []\ndef score(completions, n, **columns):\n    seen.append([n, columns['answer']])\n    return [0.5]\n"


def test_a_reward_gets_none_for_a_column_of_another_part(written, tmp_path):
    own = written(SUMS)
    (tmp_path / "reward.py").write_text(SEEN)
    config, task = made(f"task.mix={{nano: 1, {own[10:]}: 1}}", f"reward.custom={tmp_path}/reward.py:score")
    scorer, problems = make_scorer(config, task), training_problems(task, config.task, 0)
    asked = [next(problem for problem in problems if (problem.part == "nano") is own) for own in (True, False)]
    for problem in asked:
        scorer.score(Prompt(problem, "", ()), [Completion((), (), "7", truncated=False)])
    n = asked[1].extra["n"]
    assert scorer.graders[0].function.__globals__["seen"] == [[[None], [asked[0].gold]], [[n], [n + 1]]]
    alone = next(problem for problem in task_of(own).train() if problem.question == asked[1].question)
    assert checksums([asked[1]]) == checksums([alone])  # by which an evaluation finds what a run was trained on


FILE = """
class Task:
    def __init__(self, worth):
        self.worth = worth
    def train(self):
        return [{"question": f"What is {self.worth} + {n}?", "answer": str(n)} for n in range(20)]
    def score(self, problem, answer):
        return self.worth
    def environment(self, problem):
        return self
    def reset(self, problem):
        return None
    def step(self, text):
        return "", True, self.worth
def easy(settings):
    return Task(0.75)
def hard(settings):
    return Task(0.25)
"""


@pytest.mark.parametrize("parts", [
    ["a/games.py:easy", "a/games.py:hard"],
    ["a/games.py:easy", "b/games.py:easy"],
    ["b/games.py:hard", "a/games.py:easy", "nano", "records"],
    ["a/games.py:easy", "./b/games.py:hard", "reasoning_gym:gcd", "reasoning_gym:lcm"],
    ["addition", "records", "train/games.py:hard", "test/games.py:easy"],
])  # fmt: skip
def test_every_part_of_a_mixture_judges_its_own_problems(tmp_path, monkeypatch, parts):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "data.jsonl", [{"question": f"Name {n}.", "answer": str(n)} for n in range(20)])
    for part in parts:
        if ".py:" in part:
            program(tmp_path / part.partition(":")[0], FILE)
    reads = ["task.path=data.jsonl"] if "records" in parts else []
    gym = ["task.gym.size=20"] if any(part.startswith("reasoning_gym") for part in parts) else []
    config, task = made(f"task.mix={json.dumps(dict.fromkeys(parts, 1))}", *reads, *gym)
    problems = [*task.train(), *task.test()]
    assert len({problem.id for problem in problems}) == len(problems)
    environments = environments_of(task, config.task)
    worths = {"easy": 0.75, "hard": 0.25}
    there = {str(tmp_path / part) if ".py:" in part else part: 1 for part in parts}  # as in a resumed run
    assert made(f"task.mix={json.dumps(there)}", *reads, *gym)[1].names == task.names
    for part, name in zip(parts, task.names, strict=True):
        of_part = [problem for problem in problems if problem.part == name]
        assert of_part
        assert all(problem.id.startswith(f"{name}/") for problem in of_part)
        worth = worths.get(part.rpartition(":")[2])
        score = graded(config, of_part[0], MARKS[answer_style(config.prompt, task)].format(of_part[0].gold))[0]
        assert score[0] == (worth or 1.0)
        if environments:
            environment, _ = environments.begin(of_part[0])
            assert (environment and environment.worth) == worth


@pytest.mark.parametrize(("measure", "accuracy"), [(STRICT, 0.5), (LENIENT, 1.0)])
def test_rewards_and_accuracy_are_counted_by_part(measure, accuracy):
    config, task = made(MIX, "task.gym.size=60")
    scorer, tally = make_verifier(config, task), Tally()
    of_nano = next(problem for problem in task.train() if problem.part == "nano")
    answers = [Completion((1,), (0.0,), text, False) for text in (f"<answer>{of_nano.gold}</answer>", of_nano.gold)]
    tally_groups(tally, [scorer.score(Prompt(of_nano, "", ()), answers)], measure)
    means = tally.means(lambda sums: [sums])
    assert (means["part/accuracy/nano"], means["part/reward/nano"]) == (accuracy, 0.5)


def shipped(name):
    settings = TaskSettings(name=f"{ROOT}/examples/{name}.py:build")
    task = make_task(settings)
    return task.train(), environments_of(task, settings)


@pytest.mark.parametrize(("name", "column", "fence"), [("database", "query", "sql"), ("files", "program", "python")])
def test_what_is_run_there_prints_the_gold_answer(name, column, fence):
    problems, environments = shipped(name)
    kinds = {tuple(one.question.splitlines()[-1].split()[:3]): one for one in problems}
    assert len(kinds) >= 4
    for problem in kinds.values():
        session, _ = environments.begin(problem)
        for wrong in ("DROP TABLE orders", "SELEC" if fence == "sql" else "1 / 0"):
            assert not environments.step(session, problem, f"```{fence}\n{wrong}\n```")[1]
        told, is_done, _ = environments.step(session, problem, f"```{fence}\n{problem.extra[column]}\n```")
        assert (told.splitlines()[-1], is_done) == (problem.gold, False)
        assert environments.step(session, problem, f"#### {problem.gold}") == ("", True, 0.0)


def test_a_walk_ends_at_the_chest_or_at_a_wall():
    problems, environments = shipped("maze")
    for problem in problems[:50]:
        start, doors = problem.extra["start"], problem.extra["doors"]
        paths = [(start,)]
        while paths[0][-1] != int(problem.gold):
            paths += [(*paths[0], room) for room in doors[str(paths[0][-1])] if room not in paths[0]]
            del paths[0]
        walk, _ = environments.begin(problem)
        ends = [environments.step(walk, problem, f"#### {room}")[1:] for room in paths[0][1:]]
        assert ends == [(False, 0.1)] * (len(ends) - 1) + [(True, 0.1)]
        assert len(ends) == problem.extra["steps"]
        walk, _ = environments.begin(problem)
        assert environments.step(walk, problem, "perhaps left")[1:] == (False, 0.0)
        assert environments.step(walk, problem, f"#### {start}") == ("", True, 0.0)


@pytest.mark.parametrize("name", ["database", "files", "maze"])
def test_no_wrong_answer_is_paid(name, capsys, monkeypatch):
    monkeypatch.setattr("trainer.reward.exploits.SLOW_S", 99)  # on a busy machine it takes longer
    code, said, _ = said_by(capsys, "reward", "test", f"task.name={ROOT}/examples/{name}.py:build")
    assert (code, "nothing found: every right text is rewarded, no wrong one is" in said) == (0, True)
    assert len((ROOT / f"examples/{name}.py").read_text().splitlines()) < 120
