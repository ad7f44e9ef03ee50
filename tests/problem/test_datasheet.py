"""What is said about a table: the kinds of its answers, what is odd among them, and what was left out."""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT, said_by, write_lines
from trainer.answers.number import has_comma, with_points
from trainer.config.resolve import resolve
from trainer.config.settings import TaskSettings
from trainer.plan.read_data import Data
from trainer.problem import datasheet
from trainer.problem.task import make_task
from trainer.records import Completion, Prompt
from trainer.reward.make import make_scorer
from trainer.run.data import report
from trainer.stats import mcnemar, visible_gain
from trainer.watch.screen import Screen

GOLDS = {"n/a": 3, "see above": 1, "?": 1, "about 28": 1, "Paris": 1, "": 12, "3,5 m": 8, "1.234,50": 1}


def messy_table(folder: Path) -> Path:
    """Write 302 rows as a spreadsheet of Western Europe does; 28 repeat a question, 8 of them with another answer."""
    rows = [(f"Wie groß ist {number} + 1?", str(number + 1)) for number in range(246)]
    rows += [(f"Größe {gold} {number}?", gold) for gold, count in GOLDS.items() for number in range(count)]
    rows += [*rows[:20], *((question, "999") for question, _ in rows[20:28])]
    text = "".join(f'"{question}";"{gold}"\r\n' for question, gold in [("question", "answer"), *rows])
    (folder / "messy.csv").write_bytes(text.encode("cp1252"))
    assert len(rows) == 302
    return folder / "messy.csv"


def sheet_of(**settings):
    task = make_task(TaskSettings(name="records", on_bad_record="skip", **settings))
    return task, datasheet.facts_of(task, [*task.train(), *task.test()])


@pytest.mark.parametrize(("kind", "golds"), [
    ("whole numbers", "18 1,234 -3 5.0"),
    ("decimals", "3.5 -0.25 1.234,50 5e-05"),
    ("fractions", r"1/2 \frac{3}{4}"),
    ("numbers with units", "3.5|m $18 50% 18,50€"),
    ("decimal commas", "3,5 -12,75 3,5|m 0,1234"),
    ("choices", "B (c) yes False"),
    ("dates", "3.|Mär 4-Mar 2024-01-05 03.05."),
    ("texts", "Paris E=mc"),
    ("texts with digits", "3:30 R2D2 (1,2) 7|Up"),
    ("no answer", "n/a N/A na None #REF! ? ??? - ... see|above tbd s.o. unknown"),
    ("doubtful", "about|28 ~28 28? 20-30 20|–|30|m 18|or|20 4|or|-4 ca.|5"),
    ("long texts", "|".join(["word"] * 20)),
])  # fmt: skip
def test_every_answer_has_a_kind(kind, golds):
    found = {
        gold: datasheet.kind_of(gold.replace("|", " ")) for gold in ([golds] if "word" in golds else golds.split())
    }
    assert found == dict.fromkeys(found, kind)


def test_a_huge_cell_is_shown_at_once(tmp_path):
    (tmp_path / "huge.csv").write_text("question,answer\n" + "".join(f"{n}?,{'y' * 200_000}\n" for n in range(4)))
    _, facts = sheet_of(path=str(tmp_path / "huge.csv"))
    shown = datasheet.lines({"task": "records", "notes": [], "test": 1, "data": facts})
    assert all(len(line) <= datasheet.WIDTH for line in shown)


def test_a_messy_table_is_counted(tmp_path):
    task, facts = sheet_of(path=str(messy_table(tmp_path)))
    counts = {kind: one["count"] for kind, one in facts["answers"].items()}
    few = {"decimal commas": 8, "no answer": 5, "doubtful": 1, "texts": 1, "decimals": 1}
    assert counts == {"whole numbers": 246, **few}
    assert [one["count"] for one in facts["left_out"]] == [20, 12, 8]
    odd = {gold: count for gold, count in GOLDS.items() if gold not in ("", "1.234,50")}
    assert sorted((one["gold"], one["count"]) for one in facts["odd"]) == sorted(odd.items())  # each once
    assert facts["odd"][0] == {"where": f"{tmp_path}/messy.csv:248", "gold": "n/a", "count": 3, "kind": "no answer"}
    told = " ".join(task.notes())
    assert all(part in told for part in ("Windows-1252", "task.decimal=comma", "with another answer"))
    assert {problem.question[:5] for problem in task.test()} == {"Wie g", "Größe"}


def test_the_sheet_is_printed_for_80_columns_before_the_first_bad_record_is_refused(tmp_path, capsys):
    path = messy_table(tmp_path)
    named = ("task", "show", "records", f"task.path={path}", "-n", "0")
    code, out, err = said_by(capsys, *named)
    assert (code, "`answer` is empty" in err) == (2, True)
    assert max(map(len, out.replace(str(path), "messy.csv").splitlines())) <= 80
    assert "held out: 60 problems, in which a gain below 15 points may not show\n" in out
    assert "records left out: 40; the first of each kind:\n" in out
    assert re.search(r"\n        5  no answer +[^,;]+; [^,;]+; [^,;]+\n", out)
    assert re.search(r"\n  messy\.csv:2(48|49|50)             'n/a' \(3 times\)\n", out)
    code, out, _ = said_by(capsys, *named, "--json", "task.on_bad_record=skip")
    assert (code, json.loads(out)["data"]["answers"]["no answer"]["count"]) == (0, 5)


def test_a_run_and_the_doctor_say_in_a_line_that_there_are_odd_answers(tmp_path):
    path = str(messy_table(tmp_path))
    found = datasheet.finding(TaskSettings(name="records", path=path))
    assert (found.severity, found.remedy) == ("end", f"See them: octet task show records task.path={path} -n 0")
    assert (
        "60 held out, in which a gain below 15 points may not show; records left out: 40, answers unlike" in found.seen
    )
    task, facts = sheet_of(path=path)
    assert datasheet.finding(task.settings).severity == "warn"
    report(tmp_path, Screen(), Data(task, task.train(), task.test()), task.train(), "", held_out=60)
    notes = json.loads((tmp_path / "data.json").read_text())["notes"]
    odd = sum(one["count"] for one in facts["odd"])
    assert notes == [*task.notes(), f"answers unlike the others: {odd}, such as 'n/a'; `octet task show` lists them"]
    remedy = datasheet.finding(TaskSettings(name="records", path=path, holdout=0.5, decimal="comma")).remedy
    assert all(setting in remedy for setting in ("task.holdout=0.5", "task.decimal=comma"))
    (tmp_path / "good.csv").write_text("question,answer\nWho?,4\nWhy?,5\n")
    assert datasheet.finding(TaskSettings(name="records", path=f"{tmp_path}/good.csv")).severity == "note"


@pytest.mark.parametrize(("text", "is_comma", "pointed"), [
    ("3,5 m", True, "3.5 m"), ("-1.234,50 €", True, "-1234.50 €"), ("1,234", False, "1.234"),
    ("1.234", False, "1234"), ("3.5", False, "3.5"), ("1, 2", False, "1, 2"), ("1,2,3", False, "1,2,3"),
    ("12.03.2024", False, "12.03.2024"), ("1,5 bis 2,5", False, "1.5 bis 2.5"), ("x1,5", False, "x1,5"),
])  # fmt: skip
def test_a_decimal_comma(text, is_comma, pointed):
    assert (has_comma(text), with_points(text)) == (is_comma, pointed)


def test_numbers_of_json_have_a_point_whatever_the_settings_say(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"question": f"q{answer}", "answer": answer} for answer in (1.125, 1.5, "1,25")])
    settings = ["task.name=records", f"task.path={tmp_path}/a.jsonl", "task.decimal=comma"]
    task = make_task(resolve("nano", None, settings).task)
    assert {problem.gold for problem in [*task.train(), *task.test()]} == {"1.125", "1.5", "1.25"}


def test_answers_with_a_decimal_comma_are_numbers_if_the_settings_say_so(tmp_path):
    path, settings = messy_table(tmp_path), ("task.on_bad_record=skip", "task.name=records")
    config = resolve("nano", None, [*settings, f"task.path={path}", "task.decimal=comma"])
    task = make_task(config.task)
    problem = next(one for one in [*task.train(), *task.test()] if one.question == "Größe 3,5 m 0?")
    assert problem.gold == "3.5 m"
    for begin, by_strict in (("#### ", True), ("The answer is ", False)):
        answers = ("3.5", "3,5 m", "3{,}5", "$3{,}5$", "7/2 = 3,5", "35", "3", "3,5 oder 4")
        written = [Completion((), (), begin + answer, truncated=False) for answer in answers]
        scores = make_scorer(config, task).score(Prompt(problem, "", ()), written).scores
        assert [score.correct_strict for score in scores] == [by_strict] * 5 + [False] * 3
        assert [score.correct_lenient for score in scores] == [True] * 5 + [False] * 3
    assert "task.decimal" not in " ".join(task.notes())


TABLES = yaml.safe_load((ROOT / "tests/data/tables.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table["content"])
def test_a_table_is_read(tmp_path, table):
    path = tmp_path / table.get("name", "a.csv")
    path.write_bytes(table["content"].encode(table.get("encoding", "utf-8")))
    task, _ = sheet_of(path=str(path), holdout=1.0, answer=table.get("answer", "answer"))
    assert [[one.question, one.gold] for one in task.test()] == table["read"]
    notes = [note.replace(f"{tmp_path}/", "") for note in task.notes()]
    assert [table.get("note", "nothing") in note for note in notes] == [True] * ("note" in table)


@pytest.mark.parametrize(("rows", "holdout", "held_out"), [
    (10, None, 3), (100, None, 30), (200, None, 60), (300, None, 60), (900, None, 90), (300, 0.1, 30),
])  # fmt: skip
def test_enough_is_held_out_or_a_note_says_that_it_is_little(tmp_path, rows, holdout, held_out):
    write_lines(tmp_path / "a.jsonl", [{"question": f"{number}?", "answer": number} for number in range(rows)])
    task = make_task(TaskSettings(name="records", path=f"{tmp_path}/a.jsonl", holdout=holdout))
    assert (len(task.train()), len(task.test())) == (rows - held_out, held_out)
    assert ["task.holdout" in note for note in task.notes()] == ([True] if held_out < 60 else [])
    mixed = make_task(TaskSettings(name="mix", mix={"records": 1, "nano": 9}, path=f"{tmp_path}/a.jsonl"))
    assert len(mixed.train()) > 0
    # how few of a part are held out says nothing
    assert ["held out: only 30 problems" in note for note in mixed.notes()] == [True] * (10 * held_out < 60)


@pytest.mark.parametrize(("problems", "gain"), [(5, None), (27, 7), (60, 9), (100, 10), (1319, 26)])
def test_the_gain_that_held_out_problems_show(problems, gain):
    """One problem less is not significant by the exact test."""
    assert visible_gain(problems) == (gain and gain / problems)
    lost = round(problems / 20)
    for more, is_seen in ((0, True), (-1, False)) if gain else ():
        gained = lost + gain + more
        before = [False] * gained + [True] * (problems - gained)
        after = [True] * gained + [False] * lost + [True] * (problems - gained - lost)
        assert (mcnemar(before, after)[2] < 0.05) is is_seen
