"""The reward `code`: programs in answers are run against the tests of their problems."""

import gc
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import octet, refuses, write_lines
from tests.rewarding import answer, scorer_of
from tests.sandbox.lacking import python_without
from trainer.answers.find import fenced, program
from trainer.config.resolve import resolve
from trainer.errors import ConfigError, DataError
from trainer.records import Problem, Prompt, Score
from trainer.reward import exploits, make
from trainer.reward.programs import same_text
from trainer.reward.scorer import Scorer
from trainer.sandbox.pool import Assertions

MBPP = ["assert double(3) == 6", "assert double([1]) == [1, 1]", "assert double('a') == 'aa'"]
HUMANEVAL = "METADATA = {}\n\ndef check(candidate):\n    assert candidate(3) == 6\n    assert candidate(4) == 8\n"
RIGHT = "Here it is:\n```python\ndef double(x):\n    return 2 * x\n```"
PARTLY = "```python\ndef double(x):\n    return 6\n```"
READS = "```\nprint(2 * int(input()))\n```"
HALF, FUNCTIONAL = "def half(x): return x // 2", [{"input": "[3]", "output": "[3, 3]", "testtype": "functional"}]
PAIRS = [{"input": "3\n", "output": "6\n"}, {"input": "4\n", "output": "8"}]


CODE = "reward.weights={code: 1.0}"


@pytest.fixture(scope="module")
def scorer() -> Scorer:
    return scorer_of(CODE)


@pytest.fixture(scope="module")
def sharing() -> Scorer:
    return scorer_of(CODE, "reward.code.score=share", "reward.code.seconds=20")


def score(scorer: Scorer, text: str, tests: Any, **columns: Any) -> Score:
    problem = Problem("p/1", "Double it.", "", extra={"tests": tests, **columns})
    return scorer.score(Prompt(problem, "", ()), [answer(text)]).scores[0]


@pytest.mark.parametrize("text, tests, columns", [
    (RIGHT, MBPP, {}),
    (RIGHT, "\n".join(MBPP), {}),
    (RIGHT, json.dumps(MBPP), {}),
    (RIGHT, HUMANEVAL, {"entry_point": "double"}),
    (RIGHT, f"{HUMANEVAL}\ncheck(double)", {}),
    (RIGHT, HUMANEVAL.replace("candidate", "double"), {"entry_point": "double"}),
    (RIGHT, ["assert double(half(8)) == 8"], {"test_setup_code": HALF, "entry_point": "double"}),
    (RIGHT, ["assert double(math.pi) == math.tau"], {"test_imports": ["import math"]}),
    (RIGHT, [{"input": [3], "output": 6}, {"input": ["a"], "output": "aa"}], {"entry_point": "double"}),
    (RIGHT, {"fn_name": "double", "inputs": [[3], [4]], "outputs": [6, 8]}, {}),
    (RIGHT, {"fn_name": "double", "inputs": [[3], [4]], "outputs": [[6], [8]]}, {}),
    (RIGHT, json.dumps(FUNCTIONAL), {"metadata": '{"func_name": "double"}'}),
    (RIGHT, FUNCTIONAL, {"metadata": {"func_name": "double"}}),
    (RIGHT, ["assert double(10**5000) == 2 * 10**5000", "assert double(-(10**5000)) < 0"], {}),
    (READS, PAIRS, {}),
    (READS, json.dumps(PAIRS), {}),
    (READS, {"inputs": ["3", "4"], "outputs": ["6", "8"]}, {}),
])  # fmt: skip
def test_tests_are_read_in_every_form(scorer, text, tests, columns):
    assert score(scorer, text, tests, **columns).reward == 1.0
    assert score(scorer, PARTLY, tests, **columns).reward == 0.0


def test_a_stub_of_leetcode_needs_no_import_and_a_tuple_is_a_list(scorer):
    stub = "```\nclass Solution:\n    def pair(self, one: int) -> List[int]:\n        return one, one\n```"
    tests = [{"input": [3], "output": [3, 3]}, {"input": [4], "output": [4, 4]}]
    assert score(scorer, stub, tests, entry_point="pair").reward == 1.0
    wrapped = {"fn_name": "pair", "inputs": [[3]], "outputs": [[[3, 3]]]}
    assert score(scorer, stub, wrapped).reward == 1.0
    assert score(scorer, stub, [{"input": [3], "output": [[3, 3]]}], entry_point="pair").reward == 0.0
    checked = "def check(candidate):\n    assert candidate(one=3) == (3, 3)"
    assert score(scorer, stub, checked, entry_point="Solution().pair").reward == 1.0
    assert score(scorer, stub, [{"input": [3], "output": [3, 3]}], entry_point="Solution().pair").reward == 1.0


@pytest.mark.parametrize("text, tests, share", [
    (RIGHT, MBPP, 1.0), (PARTLY, MBPP, 1 / 3), (READS, PAIRS, 1.0), ("```\nprint(6)\n```", PAIRS, 0.5),
])  # fmt: skip
def test_the_share_of_the_tests_that_pass(sharing, text, tests, share):
    assert score(sharing, text, tests).reward == pytest.approx(share)


@pytest.mark.parametrize("text", [
    "", "I do not know.", "```python\n```", "```python\ndef double(x: return\n```",
    "```\nimport os; os._exit(0)\n```",
])  # fmt: skip
@pytest.mark.parametrize("tests", [MBPP, PAIRS])
def test_an_answer_without_a_program_that_works_is_worth_nothing(sharing, text, tests):
    assert score(sharing, text, tests).reward == 0.0


def test_the_processes_of_a_scorer_end_with_it():
    one = scorer_of(CODE)
    server = one.graders[0].sandbox._process
    del one
    gc.collect()
    assert server.poll() is not None


def test_tests_say_what_is_correct(scorer):
    right, wrong = score(scorer, RIGHT, MBPP), score(scorer, "No.", MBPP)
    assert (right.correct_strict, right.correct_lenient, right.strict) == (True, True, fenced(RIGHT))
    assert (wrong.correct_strict, wrong.correct_lenient, wrong.strict) == (False, False, None)
    assert [grader.name for grader in scorer.verifier().graders] == ["code"]


@pytest.mark.parametrize("body, seconds, most", [
    ("while True: pass", 0.5, 0.0), ("import time; time.sleep(1.2); print(2 * int(input()))", 2, 0.5),
])  # fmt: skip
def test_a_program_that_hangs_is_counted_and_the_time_is_for_all_tests_of_an_answer(body, seconds, most):
    scorer = scorer_of(CODE, f"reward.code.seconds={seconds}", "reward.code.score=share")
    assert score(scorer, f"```\n{body}\n```", PAIRS).reward <= most
    assert scorer.drain()["code/timeouts"] == (1.0, 1.0)


def test_the_programs_of_two_groups_do_not_run_at_once(scorer, monkeypatch):
    """Another grader may want several groups at once. All programs together would not end within their time limits."""
    (programs,), running, most = scorer.graders, [], []

    def run(reading, tests):
        running.append(reading)
        most.append(len(running))
        time.sleep(0.01)
        running.pop()
        return Assertions(1, 1)

    monkeypatch.setattr(programs, "_result", run)
    group = Prompt(Problem("p/1", "", "", extra={"tests": MBPP}), "", ()), [answer("")] * 2 * programs.at_once
    with ThreadPoolExecutor(2) as two:
        list(two.map(lambda _: scorer.score(*group), range(2)))
    assert max(most) <= programs.at_once


@pytest.mark.parametrize("of_job, at_once", [(None, 3), ("4", 3), ("8", 5)], ids=["no Slurm", "shared", "bound"])
def test_ranks_that_share_cores_run_fewer_programs_at_once(monkeypatch, of_job, at_once):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", of_job or "")
    assert scorer_of(CODE).graders[0].at_once == at_once


def test_a_command_runs_other_languages(tmp_path):
    try:
        scorer = scorer_of(CODE, "reward.code.command=sh program")
    except ConfigError as error:
        pytest.skip(str(error))
    assert score(scorer, "```sh\nread x; echo $((2 * x)) | cat\n```", PAIRS).reward == 1.0
    with refuses("p/1", DataError, names="reward.code.command=sh program"):
        score(scorer, RIGHT, MBPP)


@pytest.mark.parametrize("text, block", [
    ("```python\na\n```", "a\n"),
    ("```\na\n```\nor better\n```\nb\n```\nthat is it", "b\n"),
    ("<think>```\na\n```</think> a", None),
    ("<think>x</think>```py\na\n```", "a\n"),
    ("```\na", "a"),
    ("Call ```f(3)``` first.\n```\na\n```", "a\n"),
    ("``````\na\n``````", "a\n"),
    ("a", None),
])  # fmt: skip
def test_the_last_block_is_the_program(text, block):
    assert (fenced(text), program("<think>hm</think>print(1)")) == (block, "print(1)")


def test_backticks_without_end_are_read_in_time():
    assert fenced("```" * 60_000) is None


@pytest.mark.parametrize("output, expected, same", [
    ("6\n", "6", True), ("6  \n7\n\n", "6\n7", True), ("6\r\n7", "6\n7", True), ("6\n\n7", "6\n7", False),
    (" 6", "6", False), ("6.0", "6", False), ("", "", True),
])  # fmt: skip
def test_lines_are_compared_exactly_but_for_their_ends(output, expected, same):
    assert same_text(output.encode(), expected.encode()) is same


def test_a_fault_of_the_tests_is_found_before_a_run(scorer):
    problem = Problem("p/1", "", "", extra={"tests": "assert f(print)"})
    with refuses("p/1", DataError, names="argument"):
        scorer.rehearse(Prompt(problem, "", ()), answer(""))


def test_a_machine_that_cannot_hold_programs_in_refuses_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", python_without("LANDLOCK_CREATE_RULESET", tmp_path))
    for make_one in (lambda: make.check(resolve(None, None, [CODE]).reward), lambda: scorer_of(CODE)):
        with refuses("reward.weights.code", names="without Landl"):
            make_one()
    unsafe = [CODE, "reward.code.unsafe=true"]
    make.check(resolve(None, None, unsafe).reward)
    monkeypatch.setattr(sys, "executable", python_without("UNSHARE", tmp_path))
    with refuses("reward.code.command"):
        make.check(resolve(None, None, [*unsafe, "reward.code.command=sh program"]).reward)


def test_octet_score_needs_tests_in_place_of_an_answer_and_two_of_one_name_have_their_own(tmp_path, capsys):
    records = [{"id": "a", "completion": RIGHT, "tests": f"assert double(1) == {number}"} for number in (3, 2)]
    write_lines(tmp_path / "a.jsonl", records)
    assert octet("score", tmp_path / "a.jsonl", CODE) == 0
    assert [json.loads(line)["code"] for line in capsys.readouterr().out.splitlines()] == [0.0, 1.0]


def test_octet_reward_test_takes_labelled_programs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(exploits, "SLOW_S", 99)  # on a busy machine a program takes longer
    records = [{"completion": text, "right": text == RIGHT, "tests": MBPP} for text in (RIGHT, PARTLY)]
    write_lines(tmp_path / "a.jsonl", records)
    status = octet("reward", "test", "--labelled", tmp_path / "a.jsonl", CODE)
    told = capsys.readouterr().out
    assert status == 0, told
    assert "nothing found: every right text is rewarded, no wrong one is" in told
