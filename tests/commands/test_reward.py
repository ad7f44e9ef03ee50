"""`octet reward test`: the shipped rewards come out clean, and known exploitable functions are found."""

import inspect
import json
import re
from functools import partial

import pytest
import yaml

from tests.conftest import ROOT, said_by, write_lines
from tests.data import exploitable
from trainer.commands import reward as command
from trainer.reward import exploits
from trainer.watch.footer import Progress

FILE = ROOT / "tests/data/exploitable.py"
KINDS = yaml.safe_load((ROOT / "tests/data/exploits.yaml").read_text())
FOUND = {name: found.format(name) for found, names in KINDS.items() for name in names}


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch):
    monkeypatch.setattr(exploits, "SLOW_S", 99)
    monkeypatch.setattr(command, "Progress", partial(Progress, patience=99))


def octet(capsys, *options: str) -> tuple[int, str, str]:
    return said_by(capsys, "reward", "test", *options)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> list[str]:
    problems = [{"question": f"How much is {n} + {n}?", "answer": str(2 * n)} for n in range(20, 36)]
    path = write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", problems)
    return ["--task", "records", f"task.path={path}", "task.holdout=0.1"]


def octet_on(capsys, sums: list[str], name: str, paid: str = "") -> tuple[int, str, str]:
    weights = f"reward.weights={{{paid or name}: 1.0}}"
    return octet(capsys, "-n", "4", *sums, f"reward.custom={FILE}:{name}", weights)


def test_every_exploitable_function_is_listed():
    there = {name for name, value in vars(exploitable).items() if inspect.isfunction(value) and name[0] != "_"}
    assert there == {*FOUND, "sound", "partial", "brief"}


@pytest.mark.parametrize("name", FOUND)
def test_an_exploitable_function_is_found(capsys, monkeypatch, sums, name):
    monkeypatch.setattr(exploits, "SLOW_S", 0.003)
    status, out, _ = octet_on(capsys, sums, name)
    assert status == 1, out
    assert f"found: {FOUND[name]}" in out, out


def test_how_much_is_done_is_shown_of_what_takes_long(capsys, sums, monkeypatch):
    monkeypatch.setattr(command, "Progress", partial(Progress, patience=0))
    _, out, err = octet_on(capsys, sums, "sound")
    assert ("octet: scoring: 100%\n" in err, "scoring" in out) == (True, False)


def test_a_sound_function_comes_out_clean(capsys, sums):
    status, out, err = octet_on(capsys, sums, "sound")
    assert (status, err) == (0, ""), out
    assert "nothing found" in out
    assert "two answers, the right one last               wrong        0 of 4        0 of 4\n" in out
    assert "for every text" not in octet_on(capsys, sums, "partial")[1]  # a value that is missing is no constant


SHIPPED = "reward.weights={correct: 1, format: 0.1, length: 0.05, overlong: 0.2, repetition: 0.1, think_tags: 0.1}"
STYLES = ["gsm8k", "boxed", "few_shot", "r1_zero"]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("answer", ["strict", "lenient"])
def test_the_shipped_rewards_come_out_clean(capsys, sums, style, answer):
    status, out, _ = octet(capsys, "-n", "8", *sums, SHIPPED, f"prompt.style={style}", f"reward.answer={answer}")
    assert status == 0, out
    assert "format: 0 to 1; it does not tell right from wrong\n" in out


def test_symbolic_comparison_comes_out_clean(capsys, sums):
    pytest.importorskip("math_verify")
    status, out, _ = octet(capsys, "-n", "4", *sums, "prompt.style=boxed", "reward.symbolic=true")
    assert status == 0, out


@pytest.mark.parametrize("answer", ["strict", "lenient"])
def test_the_shipped_rewards_come_out_clean_on_letters_and_texts(capsys, tmp_path, answer):
    wrong = {n: [f"not {n}", f"{n} + 1", f"{n}!"] for n in range(12)}
    choices = [{"Question": f"What is {n}?", "Correct Answer": f"it is {n}", "wrong": wrong[n]} for n in wrong]
    path = write_lines(tmp_path / "choices.jsonl", choices)
    lenient = f"reward.answer={answer}"
    choice = ("--task", "multiple_choice", f"task.path={path}", "task.incorrect=[wrong]")
    status, out, _ = octet(capsys, *choice, lenient)
    assert status == 0, out
    texts = ["Apollo 11", "World War 2", "Summary judgment", "x=2 or x=3", "7 Up", "U.S. Grant", "(1, 2)", "101_2"]
    texts += ["\\frac{\\pi}{4}", "\\frac{1}{2}", "\\{1,2\\}", "[0,\\infty)"]
    rows = [{"question": f"Which is {text[::-1]}?", "answer": text} for text in texts]
    path = write_lines(tmp_path / "texts.jsonl", rows)
    for style in STYLES[:2]:
        own = ("--task", "records", f"task.path={path}", "task.holdout=0.1", f"prompt.style={style}")
        status, out, _ = octet(capsys, *own, lenient)
        assert status == 0, out


def test_a_right_text_that_the_weighted_sum_does_not_pay_is_found(capsys, sums):
    status, out, _ = octet_on(capsys, sums, "brief", "correct")
    assert status == 1, out
    assert "ten times as long                             right        4 of 4        0 of 4\n" in out
    assert "found: `reward` does not pay 4 of 4: a right answer, ten times as long, such as" in out
    assert "nothing found" not in out


OF_REINFORCE = "length can give one answer an advantage of 0.30, and a lone right answer has 1.00: lower the weights\n"


@pytest.mark.parametrize(("weights", "settings", "told"), [
    ("length: 0.05", [], ""),
    ("length: 0.05", ["reward.gate=false"], "length can give one answer an advantage of 2.65, and a lone"),
    ("length: 0.3", ["reward.gate=false", "reward.length_band=[1,8]"], "length can give one answer an advantage"),
    ("length: 0.05", ["reward.gate=false", "rollout.dead_by=correct"], ""),  # such groups are left out
    ("length: 0.5, overlong: 0.5", [], "length, overlong can give one answer an advantage of 0.88"),
    ("length: 0.3", ["algorithm.advantage=dr_grpo"], "length can give one answer an advantage of 0.26"),
    ("length: 0.1", ["algorithm.loss=reinforce", "reward.gate=false"], ""),  # which learns from the reward as it is
    ("length: 0.3", ["algorithm.loss=reinforce", "reward.gate=false"], OF_REINFORCE),
])  # fmt: skip
def test_shaping_that_outvotes_right_answers_is_found_before_a_run(capsys, sums, weights, settings, told):
    status, out, _ = octet(capsys, "-n", "4", *sums, f"reward.weights={{correct: 1, {weights}}}", *settings)
    assert status == bool(told), out
    assert (f"found: in a group of 8 that is all right or all wrong, {told}" in out) == bool(told)


def test_labelled_completions(capsys, tmp_path, monkeypatch):
    lines = [
        {"completion": "9 * 2 = 18\n#### 18", "answer": "18", "right": True},
        {"completion": "She makes $18 a day.", "answer": "18", "right": True},
        {"completion": "It is 20.\n#### 20", "answer": "18", "right": False},
    ]
    path = write_lines(tmp_path / "labelled.jsonl", lines)
    status, out, _ = octet(capsys, "--labelled", path, "--json")
    report = json.loads(out)
    assert status == 1
    found = "`correct` does not pay 1 of 2: a right answer, as it is, such as 'She makes $18 a day.'"
    assert found in report["findings"]
    row = next(row for row in report["rows"] if row["text"] == "as it is" and row["right"])
    assert (row["count"], row["paid"]["correct"]) == (2, 1)
    status, out, _ = octet(capsys, "--labelled", path, "reward.answer=lenient")
    assert status == 0, out
    monkeypatch.setattr("sys.stdin", path.open())
    hub = ["--task", "gsm8k"]  # whose problems are not needed
    status, out, _ = octet(capsys, "--labelled", "-", "reward.answer=lenient", *hub)
    assert (status, "2 of 2" in out) == (0, True), out


def test_data_without_answers_has_nothing_to_try_but_labelled_completions(capsys, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ({"question": f"{n}?"} for n in range(20)))
    asked = ["reward", "test", "--task", "records", f"task.path={path}", "task.answer=none"]
    status, _, err = said_by(capsys, *asked, SHIPPED)
    assert (status, "the task has no gold answers" in err) == (2, True)
    line, labelled = re.search(r"{.*}", err)[0], tmp_path / "labelled.jsonl"  # a line that the message shows
    labelled.write_text(f"{line}\n{line.replace('true', 'false').replace('may', 'does')}\n")
    status, said, err = said_by(capsys, *asked, "reward.weights={format: 1.0}", "--labelled", labelled)
    assert (status, "wrong" in said) == (1, True), err
