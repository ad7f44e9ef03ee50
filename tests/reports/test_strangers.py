"""Runs and data sets of strangers: what a command prints of them acts on no terminal, and is no markup."""

import io
import json
import shutil
from xml.etree import ElementTree

import pytest

from tests.conftest import said_by, write_lines
from tests.reports.conftest import EVIL, configure
from trainer.errors import DataError
from trainer.machine.safe_text import visible
from trainer.reports import report
from trainer.run_folder.reader import as_written, read_run

DRAWN = {"svg", "title", "rect", "text", "polyline", "polygon", "circle", "g"}
COMMANDS = {name: (name,) for name in ("report", "plot", "repro", "chat", "list")}
COMMANDS |= {"compare": ("compare", "USUAL"), "push": ("push", "--to", "me/demo"), "watch": ("watch", "--once")}
COMMANDS |= {"eval": ("eval",), "resume": ("train", "--dry-run", "--resume"), "share": ("report", "--share")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_a_stranger_is_text_on_the_screen_and_in_pictures(command, hostile, capsys):
    usual = shutil.copytree(hostile, hostile.parent / "usual")
    configure(usual, model__name="nano", rollout__stop=["[/yes]"])
    status, *said = said_by(capsys, *(usual if word == "USUAL" else word for word in COMMANDS[command]), hostile)
    said = "".join(said)
    assert visible(said) == said
    assert status == (2 if command in ("repro", "chat", "eval") else 0), said
    if command in ("compare", "push", "watch"):
        assert ("␛]0;title" in said, "[bold]markup[/bold]" in said) == (True, True)
    if command == "push":
        assert all(line.startswith("    ") for line in said.splitlines() if "<script" in line)  # in code, as text
    for picture in hostile.glob("*.svg"):
        assert {one.tag.rpartition("}")[2] for one in ElementTree.parse(picture).iter()} <= DRAWN


@pytest.mark.parametrize("command", ["play", "show"])
def test_a_data_set_of_a_stranger_is_text_on_the_screen(command, tmp_path, capsys, monkeypatch):
    rows = [{"question": f"{EVIL} {number}?", "answer": f"{EVIL} #### {number}", "id": EVIL} for number in range(3)]
    records = write_lines(tmp_path / "rows.jsonl", rows)
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{EVIL}\n\n"))
    status, *said = said_by(capsys, "task", command, "records", f"task.path={records}")
    said = "".join(said)
    assert visible(said) == said
    assert (status, "␛]0;title␇" in said, "[bold]markup[/bold]" in said) == (0, True, True), said


def _leaves(value, path=()):
    """Yield the path to each value in JSON, and to each list and mapping in it."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield (*path, key)
        yield from _leaves(one, (*path, key))


def test_an_evaluation_in_another_form_is_refused_by_name(copied):
    """Each value of eval.json in turn is another one, or left out. A page is then made, or the file is named."""
    folder = copied("other")
    whole = json.loads((folder / "eval.json").read_text())
    refused = []
    for *path, last in _leaves(whole):
        for other in (None, "text", float("inf"), [], {}, "left out"):
            found = inside = json.loads(json.dumps(whole))
            for key in path:
                inside = inside[key]
            if other == "left out":
                del inside[last]
            else:
                inside[last] = other
            (folder / "eval.json").write_text(json.dumps(found))
            run = read_run(folder)
            try:
                with as_written(folder):
                    assert [report.evaluation(run), report._result(run), run.verdict, run.flips()]
            except DataError as error:
                refused.append(str(error))
    named = [said for said in refused if said.startswith(f"{folder}/eval.json: ")]
    assert len(refused) > 180
    assert len(named) > 160, "the others show a table, but no verdict"
    assert all(said.startswith((f"{folder}/eval.json: ", f"{folder}: ")) for said in refused)
