"""Runs and data sets of strangers: what a command prints of them acts on no terminal, and is no markup."""

import io
import json
import shutil

import pytest
import yaml

from tests.conftest import said_by, write_lines
from tests.reports.conftest import configure
from trainer.errors import DataError
from trainer.machine.visible import visible
from trainer.reports import report
from trainer.run_folder.reader import read_run

EVIL = "[/INST] [bold]b[/bold] :smile: \x1b]0;title\x07\x1b[2J\x9b31m\r\u202etxet\u2066\u200b\x7f <script>x</script>"


@pytest.fixture
def strange(copied):
    """A run in whose every file a text is out to take over the screen."""
    folder = copied(f"strange{EVIL}".replace("/", "")[:60])
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["name"] = config["prompt"]["system"] = EVIL
    config["task"] |= {"name": "records", "path": f"{EVIL}.jsonl"}
    config["rollout"]["stop"] = ["[/INST]", EVIL]
    head = "# octet 0\u202e [bold] <script>, git revision abc;touch${IFS}x"  # YAML refuses control characters here
    (folder / "config.yaml").write_text(f"{head}\n{yaml.safe_dump(config)}")
    for name in ("eval.json", "machine.json", "verdict.json"):
        found = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(_poisoned(found)))
    (folder / "adapter/export.json").write_text(json.dumps({"source": ".", "format": EVIL, "not_checked": EVIL}))
    return folder


def _poisoned(value):
    """The value with the text at the end of each text in it, but for the keys of mappings."""
    if isinstance(value, dict):
        return {key: _poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_poisoned(one) for one in value]
    return value + EVIL if isinstance(value, str) else value


@pytest.fixture
def records(tmp_path):
    rows = [{"question": f"{EVIL} {number}?", "answer": f"{EVIL} #### {number}", "id": EVIL} for number in range(3)]
    return write_lines(tmp_path / "rows.jsonl", rows)


COMMANDS = {name: (name,) for name in ("report", "plot", "repro", "chat", "list")}
COMMANDS |= {"compare": ("compare", "USUAL"), "push": ("push", "--to", "me/demo"), "watch": ("watch", "--once")}
COMMANDS |= {"eval": ("eval",), "resume": ("train", "--dry-run", "--resume")}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_of_a_stranger_is_text_on_the_screen(command, strange, capsys):
    usual = shutil.copytree(strange, strange.parent / "usual")
    configure(usual, model__name="nano", rollout__stop=["[/yes]"])
    status, *said = said_by(capsys, *(usual if word == "USUAL" else word for word in COMMANDS[command]), strange)
    said = "".join(said)
    assert visible(said) == said
    assert status == (2 if command in ("repro", "chat", "eval") else 0), said
    if command in ("compare", "push"):
        assert "[bold]b[/bold] :smile: ␛]0;title" in said
    if command == "push":
        assert all(line.startswith("    ") for line in said.splitlines() if "<script" in line)  # in code, as text


@pytest.mark.parametrize("command", [("task", "play", "records"), ("task", "show", "records")])
def test_a_data_set_of_a_stranger_is_text_on_the_screen(command, records, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{EVIL}\n\n"))
    status, *said = said_by(capsys, *command, f"task.path={records}")
    said = "".join(said)
    assert visible(said) == said
    assert (status, "[bold]b[/bold] :smile: ␛]0;title" in said) == (0, True), said


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
                assert [report.evaluation(run), report._result(run), run.verdict, run.flips()]
            except DataError as error:
                refused.append(str(error))
    assert len(refused) > 100
    assert all(f"{folder}/eval.json: it is not as Octet writes it" in said for said in refused)
