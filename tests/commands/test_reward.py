"""`octet reward test`: the shipped rewards come out clean, and known exploitable functions are found."""

import inspect
import json
import re
from functools import partial

import pytest
import yaml

from tests.conftest import ROOT, said_by, write_lines
from tests.data import exploitable
from trainer.reward import exploits
from trainer.watch.footer import Progress

FILE = ROOT / "tests/data/exploitable.py"
KINDS = yaml.safe_load((ROOT / "tests/data/exploits.yaml").read_text())
FOUND = {name: found.format(name) for found, names in KINDS.items() for name in names}


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch):
    monkeypatch.setattr(exploits, "SLOW_S", 99)
    monkeypatch.setattr(exploits, "Progress", partial(Progress, patience=99))


def octet(capsys, *options: str) -> tuple[int, str, str]:
    return said_by(capsys, "reward", "test", *options)


@pytest.fixture(scope="module")
def sums(tmp_path_factory) -> list[str]:
    problems = [{"question": f"How much is {n} + {n}?", "answer": str(2 * n)} for n in range(20, 36)]
    path = write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", problems)
    return ["--task", "records", f"task.path={path}", "task.holdout=0.1"]


def octet_on(capsys, sums: list[str], name: str, *options: str, paid: str = "") -> tuple[int, str, str]:
    weights = f"reward.weights={{{paid or name}: 1.0}}"
    return octet(capsys, "-n", "4", *sums, f"reward.custom={FILE}:{name}", weights, *options)


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
    monkeypatch.setattr(exploits, "Progress", partial(Progress, patience=0))
    _, out, err = octet_on(capsys, sums, "sound")
    assert ("octet: scoring: 100%\n" in err, "scoring" in out) == (True, False)


def test_a_sound_function_comes_out_clean(capsys, sums):
    status, out, err = octet_on(capsys, sums, "sound")
    assert (status, err, "two answers" in out) == (0, "", False), out
    assert "nothing found" in out
    out = octet_on(capsys, sums, "sound", "--all")[1]
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
    status, out, _ = octet_on(capsys, sums, "brief", paid="correct")
    assert status == 1, out
    assert "ten times as long                             right        4 of 4        0 of 4\n" in out
    assert "found: `reward` does not pay a right answer in 4 of 4: ten times as long; " in out
    assert "nothing found" not in out


def test_variants_of_one_mistake_share_a_line_and_so_does_the_weighted_sum(capsys, sums):
    _, out, _ = octet_on(capsys, sums, "mentions")
    assert "found: `reward` pays" not in out, out
    _, out, _ = octet_on(capsys, sums, "no_steps")
    assert "right answer in 4 of 4: steps, 25 times; steps, 50 times, such" in out, out
    assert (out.count("\nsteps, 25 times "), out.count("\nsteps, 50 times ")) == (1, 0), out


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
    found = "`correct` does not pay a right answer in 1 of 2 (and in 10 variants of it), such as 'She makes $18 a day.'"
    assert found in report["findings"]
    row = next(row for row in report["rows"] if row["text"] == "as it is" and row["right"])
    assert (row["count"], row["paid"]["correct"]) == (2, 1)
    status, out, _ = octet(capsys, "--labelled", path, "reward.answer=lenient")
    assert status == 0, out
    monkeypatch.setattr("sys.stdin", path.open())
    hub = ["--task", "gsm8k"]  # whose problems are not needed
    status, out, _ = octet(capsys, "--labelled", "-", "--all", "reward.answer=lenient", *hub)
    assert (status, "2 of 2" in out) == (0, True), out


ORDERS = """
import json

def score(completions, city, name, **columns):
    return [0.5 * (text != "") + (text.strip()[:1] == "{" and json.loads(text) == {"city": one, "name": other})
            for text, one, other in zip(completions, city, name)]

def parsed(completions, **columns):
    return [float(text[:1] == "{") for text in completions]

def brief(completions, city, **columns):
    return [1 / (1 + len(text)) for text in completions]

def wordy(completions, **columns):
    return [min(1, len(text) / 500) for text in completions]

CALLS = []

def later(completions, **columns):
    CALLS.append(0)
    return [len(CALLS) / 99 for _ in completions]

def endless(completions, **columns):
    return [float("nan") if len(text) > 500 else 0.5 for text in completions]

def wide(completions, **columns):
    return [9.0 * text.count("#") for text in completions]

def nothing(completions, **columns):
    return [None for _ in completions]

def copied(completions, question, **columns):
    return [float(one in text) for text, one in zip(completions, question)]
"""
FOUND_WITHOUT_ANSWERS = {
    "brief": "`brief` pays more than for a plain text, 1 and",
    "wordy": "on average: said three times",
    "later": "`later` is not deterministic",
    "endless": "a plain text, ten times as long; a plain text, format marks, 25 times; ",
    "wide": "`wide` is not bounded",
    "nothing": "`nothing` is None for every text",
    "copied": "`copied` pays more than for a plain text, 1 and 0 on average: the prompt, copied",
    "score": "`score` pays no text that was tried more than it pays here, 0.5 on average: the prompt, copied",
}


@pytest.fixture
def orders(tmp_path) -> list[str]:
    rows = [{"question": f"Order {n}: a lamp for Ann in Bonn{n}", "city": f"Bonn{n}", "name": "Ann"} for n in range(20)]
    path = write_lines(tmp_path / "orders.jsonl", rows)
    (tmp_path / "orders.py").write_text(ORDERS)
    return ["--task", "records", f"task.path={path}", "task.answer=none"]


def octet_on_orders(capsys, orders: list[str], tmp_path, name: str, *options: str) -> tuple[int, str, str]:
    function = f"reward.custom={tmp_path}/orders.py:{name}"
    return octet(capsys, "-n", "4", *orders, function, f"reward.weights={{{name}: 1}}", *map(str, options))


def test_without_gold_answers_only_what_needs_none_is_tried(capsys, orders, tmp_path):
    for name, found in FOUND_WITHOUT_ANSWERS.items():
        status, out, _ = octet_on_orders(capsys, orders, tmp_path, name)
        assert (status, found in out, "right" in out) == (1, True, False), out
    status, out, err = octet_on_orders(capsys, orders, tmp_path, "parsed")
    assert (status, "nothing found" in out, "no gold answers" in err) == (0, True, True), out
    out = octet_on_orders(capsys, orders, tmp_path, "brief", "--all")[1]
    assert re.search(r"^text +mean\n(.*\n)*nothing +1$", out, re.MULTILINE), out


def test_the_line_that_is_shown_names_the_columns_and_a_question_stands_for_them(capsys, orders, tmp_path):
    err = octet_on_orders(capsys, orders, tmp_path, "score")[2]
    line = json.loads(re.search(r"^{.*}$", err, re.MULTILINE)[0])
    assert [*line] == ["question", "city", "name", "completion", "right"]
    right = {**line, "completion": json.dumps({"city": line.pop("city"), "name": line.pop("name")})}
    lines = [right, {**line, "right": False}, {**line, "completion": right["completion"]}]
    labelled = ["--labelled", write_lines(tmp_path / "labelled.jsonl", lines), "--all", "--json"]
    status, out, err = octet_on_orders(capsys, orders, tmp_path, "score", *labelled)
    assert err == ""
    rows = json.loads(out)["rows"]
    assert [(row["text"], row["paid"]["score"]) for row in rows if row["right"]] == [(kind, 2) for kind in OF_ANY]
    assert [row["text"] for row in rows[-2:]] == ["nothing", "the prompt, copied"]
    assert status == 1, "its half a point for any text is found"


def test_a_labelled_question_that_is_not_in_the_task_is_named(capsys, orders, tmp_path):
    line = {"question": "Order 99", "completion": "x", "right": False}
    for lines, named in (([line], "Order 99"), ([line | {"city": "Bonn", "name": "Ann"}], "one kind only")):
        labelled = write_lines(tmp_path / "labelled.jsonl", lines)
        status, out, err = octet_on_orders(capsys, orders, tmp_path, "score", "--labelled", labelled)
        assert (status > 0, named in out + err) == (True, True), err


OF_ANY = ["as it is", "space around it"]  # the variants of a right text whose form is not known
