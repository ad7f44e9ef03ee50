"""Runs side by side, from the files that a run leaves."""

import csv
import io
import json
import re

import pytest

from tests.commands.conftest import config_of, write
from tests.conftest import said_by, write_lines
from trainer.commands import compare


def run_in(folder, accuracies: dict[int, float], *overrides: str):
    write(folder, {"config.yaml": config_of(*overrides)})
    lines = [{"step": 0, "eval/accuracy": 0.9, "eval/low": 0.8, "eval/high": 0.95, "eval/problems": 64}]
    for step in range(1, 5):
        line = {"step": step, "time/rollout": 10.0, "time/step": 5.5, "time/reward/judge": 7.0, "time/evaluation": 9.0}
        if value := accuracies.get(step):
            line |= {"eval/accuracy": value, "eval/low": value - 0.1, "eval/high": value + 0.1, "eval/problems": 64}
        lines.append(line)
    with write_lines(folder / "metrics.jsonl", lines).open("a") as file:
        file.write('{"step": 5, "cut')
    return folder


@pytest.fixture
def runs(tmp_path):
    worse = run_in(tmp_path / "a", {2: 0.55, 4: 0.5}, "algorithm.lr=1e-3", "run.dir=a")
    better = run_in(tmp_path / "b", {4: 0.75}, "algorithm.lr=2e-3", "run.dir=b", "run.threads=2")
    return [worse, better]


def test_the_better_run_comes_first_with_what_differs(runs, capsys):
    first, second = json.loads(said_by(capsys, "compare", *runs, "--json")[1])
    assert (first["run"], first["settings"]) == (str(runs[1]), {"algorithm.lr": 0.002})
    assert first["settings"].keys() == {"algorithm.lr"}  # folder and threads change nothing that is learned
    assert (first["accuracy"], first["interval"]) == (0.75, [0.65, 0.85])
    assert (second["accuracy"], second["best"]) == (0.5, 0.55)  # the base model's 0.9 is nobody's result
    assert (second["steps"], second["training_s"]) == (4, 62.0)
    first, second = csv.DictReader(io.StringIO(said_by(capsys, "compare", *runs, "--csv")[1]))
    assert (first["run"], first["algorithm.lr"], first["accuracy"]) == (str(runs[1]), "0.002", "0.75")
    assert (first["low"], first["high"], second["best"]) == ("0.65", "0.85", "0.55")


def test_the_table_has_a_line_for_each_run(runs, tmp_path, capsys):
    (runs[0] / "metrics.jsonl").unlink()
    never = run_in(tmp_path / "never", {}, "algorithm.lr=3e-3", "eval.problems=0", "run.dir=never")
    lines = [re.split(r"\s{2,}", line.strip()) for line in said_by(capsys, "compare", *runs, never)[1].splitlines()]
    assert ["b", "0.002", "512", "75.0% (65.0-85.0)", "75.0%", "4", "1:02"] in lines
    assert ["a", "0.001", "512", "none yet", "-", "0", "0:00"] in lines
    assert ["never", "0.003", "0", "-", "-", "4", "1:02"] in lines
    said = said_by(capsys, "list", tmp_path)[1] + said_by(capsys, "compare", *runs)[1]
    assert not re.search(r"[ \t]$", said, re.MULTILINE)


def test_a_run_without_a_result_comes_last_behind_negative_rewards_too(tmp_path, capsys):
    given = {"none": None, "worse": -0.5, "better": -0.1}
    of_task = ["task.name=records", "task.path=a.jsonl", "task.answer=none", "reward.weights={length: 1.0}"]
    for name, reward in given.items():
        folder = run_in(tmp_path / name, {}, *of_task, f"lora.rslora={name == 'none'}".lower())
        found = {"eval/reward": reward, "eval/low": -1.0, "eval/high": 0.0, "eval/problems": 64}
        write_lines(folder / "metrics.jsonl", [{"step": 4, **(found if reward else {})}])
    _, table, _ = said_by(capsys, "compare", *(tmp_path / name for name in given))
    rows = [line.split()[:2] for line in table.splitlines() if line.startswith(tuple(given))]
    assert rows == [["better", "false"], ["worse", "false"], ["none", "true"]]


def test_a_wide_table_is_split_into_some_that_fit(tmp_path, capsys, monkeypatch):
    few = ["algorithm.kl.coef=0.1", "rollout.temperature=0.9", "rollout.max_new_tokens=99", "lora.r=4", "run.seed=3"]
    runs = [run_in(tmp_path / "first", {4: 0.5}), run_in(tmp_path / "second", {4: 0.6}, *few, "optim.warmup=0.5")]
    answered(runs[0], "yyyy")
    answered(runs[1], "nnnn")
    monkeypatch.setattr(compare, "WIDTH", 100)
    lines = said_by(capsys, "compare", *runs)[1].splitlines()
    assert max(map(len, lines)) <= 100
    assert sum(line.startswith("second") for line in lines) == 3  # tables
    for text in ("rollout.max_new_tokens", "lora.r", "+100.0 (-8.2 to +100.0), p = 0.12"):
        assert text in "\n".join(lines)


def test_settings_that_are_the_same_in_a_table_are_left_out_and_none_is_not_set(runs, tmp_path, capsys):
    other = run_in(tmp_path / "c", {4: 0.9}, "task.name=records", "task.path=a.jsonl", "run.dir=c", "algorithm.lr=2e-3")
    last = run_in(tmp_path / "d", {}, "task.name=records", "task.path=a.jsonl", "run.dir=d", "algorithm.lr=2e-3")
    said = said_by(capsys, "compare", *runs, other, last)[1]
    assert said.count("algorithm.lr") == 1
    assert "task.name" not in said


def answered(folder, right: str, start: int = 0) -> None:
    """Write held-out answers of the trained model: y for a right one."""
    records = [
        {"model": model, "temperature": 0.0, "question": f"{start + at}?", "gold": "1", "correct_strict": mark == "y"}
        for model in ("base", "trained")
        for at, mark in enumerate(right if model == "trained" else "n" * len(right))
    ]
    write_lines(folder / "eval_answers.jsonl", records)
    (folder / "verdict.json").write_text("{}")  # the run has ended


def test_runs_on_the_same_problems_are_tested_problem_by_problem(runs, capsys):
    answered(runs[1], "yyyyyyyynny")
    answered(runs[0], "nnnnnnnnyny")
    best, other = json.loads(said_by(capsys, "compare", *runs, "--json")[1])
    assert best["against"] is None
    assert other["against"]["run"] == str(runs[1])
    assert [other["against"][name] for name in ("problems", "gained", "lost")] == [11, 1, 8]
    assert other["against"]["p"] == pytest.approx(10 / 256)
    assert "against the first" in (said := said_by(capsys, "compare", *runs)[1])
    assert "-63.6 (-100.0 to -7.1), p = 0.039" in said
    log = runs[0] / "metrics.jsonl"
    log.write_text(log.read_text().replace('"eval/problems": 64', '"eval/problems": 32'))
    assert "problems: 32, 64 (compared on those that both have); 95 %" in said_by(capsys, "compare", *runs)[1]


def test_p_is_corrected_for_as_many_runs_as_are_compared(runs, tmp_path, capsys):
    """Holm: the smaller p twice, the larger once, and never below the smaller."""
    third, apart = (run_in(tmp_path / name, {}, f"algorithm.lr={rate}") for name, rate in (("c", 3e-3), ("d", 4e-3)))
    answered(runs[1], "yyyyyyyyyyyy")
    answered(runs[0], "nnnnnnnnyyyy")
    answered(third, "nnnnnnyyyyyy")
    answered(apart, "yy", start=50)
    against = [row["against"] for row in json.loads(said_by(capsys, "compare", *runs, third, apart, "--json")[1])]
    assert [one and one["p"] for one in against] == [None, 4 / 256, 2 / 64, None]
    assert "95 % intervals, p corrected for 2 runs (Holm)" in said_by(capsys, "compare", *runs, third, apart)[1]


def test_runs_that_differ_only_in_their_seed_are_one_row(runs, tmp_path, capsys):
    seeds = [
        run_in(tmp_path / f"s{seed}", {4: seed / 10}, f"run.seed={seed}", f"run.dir=s{seed}") for seed in (8, 7, 9)
    ]
    answered(seeds[0], "yyyyyyyyynny")
    answered(runs[0], "nnnnnnnnnyny")
    lines = [re.split(r"\s{2,}", line.strip()) for line in said_by(capsys, "compare", *runs, *seeds)[1].splitlines()]
    rows = [line for line in lines if line[0] in ("a", "b", "s8, s7, s9")]
    assert [line[0] for line in rows] == ["s8, s7, s9", "b", "a"]
    assert rows[0][2:] == ["3 seeds", "80.0% (70.0-90.0)", "80.0%", "4", "1:02"]
    assert "against the first" not in str(lines)  # a test against the best of several seeds
    (seeds[1] / "metrics.jsonl").unlink()
    alone = said_by(capsys, "compare", *seeds)[1]
    assert "2 of 3 seeds" in alone
    assert "85.0% (80.0-90.0)" in alone
    assert len(json.loads(said_by(capsys, "compare", *seeds, "--json")[1])) == 3
    again = run_in(tmp_path / "again", {4: 0.8}, "run.seed=8", "run.dir=again")
    assert "seeds" not in said_by(capsys, "compare", again, *seeds)[1]  # a seed twice: the code may have changed


def test_runs_on_other_problems_or_tasks_are_not_compared(runs, tmp_path, capsys):
    answered(runs[0], "yn")
    answered(runs[1], "yn", start=2)
    other = run_in(tmp_path / "c", {4: 0.9}, "task.name=records", "task.path=a.jsonl", "run.dir=c")
    answered(other, "yy")
    rows = json.loads(said_by(capsys, "compare", *runs, other, "--json")[1])
    assert [row["run"] for row in rows] == [str(runs[1]), str(runs[0]), str(other)]  # not before the other task
    assert [row["against"] for row in rows] == [None] * 3
    assert "different tasks or rewards are not compared" in said_by(capsys, "compare", *runs, other)[1]
