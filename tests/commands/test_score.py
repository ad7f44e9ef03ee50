"""`octet score`: what goes in, what comes out, and what is said about a broken line."""

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT, launch, ran, said_by
from trainer.config.resolve import resolve
from trainer.problem.task import make_task

OCTET = [sys.executable, "-m", "trainer.commands.main"]
KEYS = ["strict", "lenient", "correct_strict", "correct_lenient", "correct", "format", "length", "overlong"]
KEYS += ["repetition", "think_tags", "reward"]


@pytest.fixture
def score(tmp_path, capsys):

    def run(*lines: Any, options: tuple[str, ...] = ("--task", "gsm8k")) -> tuple[int, list[dict[str, Any]], str]:
        path = tmp_path / "answers.jsonl"
        parts = (line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        path.write_bytes(b"".join(parts))
        status, said, told = said_by(capsys, "score", path, *options)
        return status, [json.loads(line) for line in said.splitlines()], told

    return run


def test_one_object_for_each_line_in_order(score):
    status, out, _ = score(
        {"completion": "3 * 4 = 12\n#### 12", "answer": "12"},
        {"completion": "The answer is 12.", "answer": "So it is 12.\n#### 12"},
        {"completion": "No idea.", "answer": 12},
    )
    assert (status, [list(one) for one in out]) == (0, [KEYS] * 3)
    names = ("strict", "lenient", "correct_strict", "correct_lenient", "reward")
    assert [[one[name] for name in names] for one in out] == [
        ["12", "12", True, True, 1.0], [None, "12", False, True, 0.0], [None, None, False, False, 0.0],
    ]  # fmt: skip


def test_every_component_is_shown_and_only_those_with_a_weight_count(score, tmp_path):
    line = {"completion": "x" * 60 + " <think>", "answer": "12", "tokens": [1, 2]}
    _, (one,), _ = score(line, options=("reward.weights={length: 0.5, overlong: 1}",))
    assert (one["correct"], one["length"], one["overlong"], one["reward"]) == (0.0, 1.0, 0.0, 0.5)
    bom = b'\xef\xbb\xbf{"completion": "#### 1", "answer": "1"}\r\n'  # without tokens, and Windows has written it
    (recipe := tmp_path / "recipe.yaml").write_text("reward: {weights: {overlong: 1}}")
    _, (one,), _ = score(bom, options=("--recipe", str(recipe)))
    assert (one["correct"], one["overlong"], one["reward"]) == (1.0, None, None)


def test_samples_of_a_run_are_scored_with_its_settings(score, tmp_path):
    settings = tmp_path / "config.yaml"
    settings.write_text(resolve("nano", None, ["reward.weights={correct: 1, length: 0.5}"]).to_yaml())
    line = {"completion": "x" * 60 + "\n#### 12", "gold": "12"}
    _, (one,), said = score(line, options=())
    assert one["reward"] == pytest.approx(1.5)
    assert said == f"octet: with the settings of {settings}; --preset names others\n"
    _, (other,), said = score(line, options=("--preset", "nano"))
    assert (other["reward"], said) == (1.0, "")


def test_rewards_of_ones_own_see_the_columns_that_training_gives_them(score, tmp_path):
    """GSM8K's `answer` is the whole solution, and its number is `gold`."""
    (tmp_path / "mine.py").write_text(
        "def hard(prompts, completions, level, question, problem_id, answer, gold, **c):\n"
        "    assert prompts == question and problem_id == ['a', 'b']\n"
        "    assert gold == ['1', '1'] and answer == ['0 + 1 = 1\\n#### 1'] * 2\n"
        "    return [float(one) for one in level]"
    )
    line = {"completion": "#### 1", "answer": "0 + 1 = 1\n#### 1", "question": "q"}
    lines = [line | {"level": level, "id": name} for level, name in ((3, "a"), (4, "b"))]
    status, out, said = score(*lines, options=("--task", "gsm8k", f"reward.custom={tmp_path}/mine.py:hard"))
    assert status == 0, said
    assert [(one["hard"], one["reward"]) for one in out] == [(3.0, 3.0), (4.0, 4.0)]  # nothing else is paid


def test_samples_of_a_run_have_the_columns_of_its_records(score, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def named(completions, who, **c):\n    return [float(n in t) for n, t in zip(who, completions)]"
    )
    (tmp_path / "train.jsonl").write_text(
        '{"question": "Who?", "answer": "5", "who": "Ann"}\n{"question": "B?", "answer": "2", "who": "B"}\n'
    )
    named = ["task.name=records", f"task.path={tmp_path}/train.jsonl", f"reward.custom={tmp_path}/mine.py:named"]
    config = resolve("nano", None, [*named, "task.holdout=0.1"])
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    task = make_task(config.task)
    (left,), (held_out,) = task.train(), task.test()
    asked = ({"prompt": "the text of a prompt"}, {"question": held_out.question, "tokens": 5})  # in eval_answers.jsonl
    for problem, question in zip((left, held_out), asked, strict=True):
        line = {"problem": problem.id, "gold": problem.gold, **question}
        status, (one,), said = score(line | {"completion": f"{problem.extra['who']}\n#### {problem.gold}"}, options=())
        assert (status, one["named"], one["correct"]) == (0, 1.0, 1.0), said
    status, _, said = score(line | {"gold": "7", "completion": "#### 7"}, options=())  # another problem has its number
    assert (status, "`who`" in said) == (2, True), said


def test_gold_answers_with_a_decimal_comma(score):
    options = ("--task", "records", "task.decimal=comma")
    golds = ({"answer": "3,5"}, {"answer": 3.5}, {"gold": "3.5"}, {"answer": "So.\n#### 3.5"})
    for written in ("#### 3.5", "#### 3,5"):
        _, out, _ = score(*({"completion": written} | gold for gold in golds), options=options)
        assert [one["correct_strict"] for one in out] == [True] * 4


def test_functions_see_a_conversation(score, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def chat(prompts, completions, **c):\n"
        "    return [float(p[0]['content'] == 'q' and c[0]['content'] == 'a') for p, c in zip(prompts, completions)]"
    )
    line = {"completion": "a", "answer": "1", "prompt": [{"role": "user", "content": "q"}]}
    _, (one,), said = score(line, options=(f"reward.custom={tmp_path}/mine.py:chat",))
    assert one["chat"] == 1.0, said


@pytest.mark.parametrize("options, completion, gold", [
    (("--task", "math", "reward.symbolic=false"), r"It is \boxed{1/2}.", r"So \boxed{\frac{1}{2}}"),
    (("--task", "multiple_choice"), "Answer: C", "C"),
    (("--task", "math", "reward.symbolic=false", "prompt.style=chat"), r"It is \boxed{7}.", "7"),
    (("--task", "multiple_choice", "prompt.style=few_shot"), "Answer: C", "C"),
    (("prompt.answer=boxed",), r"It is \boxed{7}.", "7"),
    (("prompt.style=r1_zero",), "So.</think><answer>7</answer>", "7"),
    (("prompt.style=r1_zero",), "<think>So.</think> <answer>7</answer>", "7"),
    ((), "#### Apollo 11", "Apollo 11"),
])  # fmt: skip
def test_every_task_and_style_has_its_own_place_for_the_answer(score, options, completion, gold):
    status, out, said = score({"completion": completion, "answer": gold}, options=options)
    assert status == 0, said
    assert out[0]["correct_strict"]


def test_a_judge_that_is_away_is_said(score, tmp_path):
    named = ["url=http://127.0.0.1:9/v1", "model=m", "retries=0", f"cache={tmp_path}/cache"]
    options = (*(f"reward.judge.{one}" for one in named), "reward.weights={judge: 1, correct: 1}")
    status, (one,), said = score({"completion": "#### 1", "answer": "1"}, options=options)
    assert (status, one["judge"], one["correct"], one["reward"]) == (0, None, 1.0, None)
    assert "the judge gave no grade for 1 of 1 completions" in said


def test_standard_input_without_torch():
    lines = '{"completion": "#### 1", "answer": "1"}\nbroken'
    code = "import sys; from trainer.commands.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    done = ran(sys.executable, "-c", code, "score", "-", input=lines)
    assert (done.returncode, json.loads(done.stdout.splitlines()[0])["reward"]) == (2, 1.0)
    assert done.stdout.splitlines()[1] == "False"
    no_json = "not JSON: Expecting value: line 1 column 1 (char 0). Correct that line."
    assert done.stderr == f"octet: standard input:2: {no_json}\n"


def test_a_standard_output_that_is_closed(tmp_path):
    (tmp_path / "one.jsonl").write_text('{"completion": "#### 1", "answer": "1"}\n')
    shell = ["sh", "-c", f"{shlex.join(OCTET)} score one.jsonl >&-"]
    done = launch(*shell, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_of_a_long_file_stands_on_standard_error(score, monkeypatch):
    line = {"completion": "#### 4", "answer": "4"}
    assert score(*[line] * 8)[2] == ""
    monkeypatch.setattr("trainer.commands.score.PATIENCE_S", 0.0)
    status, records, said = score(*[line] * 8)
    assert (status, len(records)) == (0, 8)
    assert [shown.split(",")[0].split()[-1] for shown in said.splitlines()] == ["0%", "25%", "50%", "75%", "100%"]


def test_a_reader_that_stops_early(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text('{"completion": "#### 1", "answer": "1"}\n' * 5_000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*OCTET, "score", path], cwd=ROOT, **pipes) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
