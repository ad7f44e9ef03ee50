"""Before a run: every gold answer, written as asked, is paid. What nobody can give is refused."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, ran, write_lines
from trainer.config.resolve import resolve
from trainer.problem.task import make_task
from trainer.reward import gold_check

PARAGRAPH = "It is a long story. " * 40


def check(folder, answers: list[str], *overrides: str) -> None:
    records = [{"question": f"question {index}", "answer": answer} for index, answer in enumerate(answers)]
    write_lines(folder / "a.jsonl", records)
    config = resolve("nano", None, ["task.name=records", f"task.path={folder}/a.jsonl", "task.holdout=1.0", *overrides])
    task = make_task(config.task)
    gold_check.check(config, task, task.test())


TEXTS = ["Apollo 11", "World War 2", "the end of the cold war", "Summary judgment", "7 Up", "U.S. Grant", "x=2 or x=3",
         "3 pm", "Step 1: add", "(1, 2)", "\\frac{1}{2}", "18", "1,234", "n", "no, wait", "maybe 18", "not 18",
         "18 or 20", "4!", "a/b", "The answer is 42", "#1", "50%", "A", "because"]  # fmt: skip


# With a stop string that no answer contains, and with what a message proposes for other marks than those of the style.
MORE = ["rollout.stop=['Question:']", "prompt.answer=gsm8k"]
MORE += ["reward.answer=lenient", "reward.weights={correct: 1, format: 0.1}"]


@pytest.mark.parametrize("style", ["gsm8k", "boxed", "chat", "few_shot", "r1_zero"])
@pytest.mark.parametrize("setting", MORE)
def test_every_kind_of_gold_answer_can_be_earned(tmp_path, style, setting):
    check(tmp_path, TEXTS, f"prompt.style={style}", setting)


@pytest.mark.parametrize("task", ["task.name=reasoning_gym:gcd", "task.mix={nano: 1, reasoning_gym:gcd: 1}"])
def test_answers_of_reasoning_gym_are_read_in_tags(task):
    for setting in ("prompt.style=auto", "prompt.style=few_shot", "prompt.style=tags", "prompt.answer=tags"):
        config = resolve("nano", None, [task, "task.gym={size: 20}", setting])
        made = make_task(config.task)
        gold_check.check(config, made, made.train())


def test_nothing_is_refused_where_nothing_is_compared(tmp_path):
    check(tmp_path, [PARAGRAPH, PARAGRAPH + "."], "reward.weights={length: 1}", "eval.problems=0")
    check(tmp_path, [PARAGRAPH, PARAGRAPH + "."], "task.answer=none")


def test_of_many_a_sample_is_checked(monkeypatch, tmp_path):
    seen = []
    for name, count in {"MOST": 20, "SAMPLE": 10}.items():
        monkeypatch.setattr(gold_check, name, count)
    monkeypatch.setattr(gold_check, "is_earned", lambda problem, rules: seen.append(problem.id) or True)
    for _ in range(2):
        check(tmp_path, [str(index) for index in range(30)], "run.seed=1")
    assert (len(set(seen)), seen[:10]) == (10, seen[10:])


UNEARNED = "gold answers cannot be earned. Written as '#### ...'"


@pytest.mark.parametrize(("command", "status", "told"), [
    ("train.py --preset nano task.name=records task.path=a.jsonl", 2, UNEARNED),
    ("octet task show records task.path=a.jsonl", 2, UNEARNED),
    ("octet task play records task.path=a.jsonl", 2, UNEARNED),
    ("octet eval --task records task.path=a.jsonl", 2, UNEARNED),
    ("octet task show records task.path=good.jsonl -n 0", 0, "9  whole numbers"),
    ("train.py --preset nano reward.custom=mine.py:score", 2, "it returned 1 rewards for 4 completions"),
    ("train.py --preset nano reward.custom=nowhere.py:score", 2, "there is no file"),
    ("train.py task.name=records task.path=broken.jsonl", 2, "broken.jsonl:2: "),
    ("octet train task.name=records task.path=broken.jsonl", 2, "broken.jsonl:2: "),
    ("train.py model.name=no/such", 2, "model.name=no/such: "),
    ("train.py engine.ds_config=zero9", 2, "engine.ds_config=zero9: "),
    ("train.py task.name=gsm8k", 2, "task.name=gsm8k: "),
])  # fmt: skip
def test_what_cannot_be_used_is_named_before_torch_is_imported(tmp_path, command, status, told):
    """Importing torch takes seconds; `-X importtime` lists what was imported."""
    for name, answer in {"a": "two\nlines", "good": "7"}.items():
        write_lines(tmp_path / f"{name}.jsonl", [{"question": f"{n}?", "answer": answer} for n in range(9)])
    (tmp_path / "broken.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\nbroken\n')
    (tmp_path / "mine.py").write_text("def score(completions, **c): return [1.0]")
    words = command.replace("train.py", str(ROOT / "train.py")).replace("octet", "-m trainer.commands.main").split()
    around = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "empty")}
    done = ran(sys.executable, "-X", "importtime", *words, cwd=tmp_path, env=around, stdin=subprocess.DEVNULL)
    assert (done.returncode, told in done.stdout + done.stderr) == (status, True), done
    assert ("Traceback" in done.stderr, (tmp_path / "runs").exists()) == (False, False), done
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert {"pydantic", "torch", "transformers"} & imported == {"pydantic"}
