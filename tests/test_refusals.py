"""What is refused, and with which words: data/refusals.yaml has a row for each, and holds the whole sentences. A row is
of settings, or of a command with the files that it reads.

`python -m tests.test_refusals` writes the sentences anew, after one was changed on purpose; `git diff` shows them.
"""

import contextlib
import io
import os
import re
import shlex
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT, octet
from trainer.config import conflicts
from trainer.config.resolve import resolve
from trainer.errors import ConfigError

FILE = ROOT / "tests/data/refusals.yaml"
TABLE: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())
SETTINGS = [row for row in TABLE if "settings" in row]
COMMANDS = [row for row in TABLE if "command" in row]


def refused(settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve("nano", None, re.split(r" (?=\w+\.[\w.]+=)", settings))
    return caught.value


def said_by(row: dict[str, Any]) -> str:
    """Write the files of a row into this folder, run its command, which is refused with status 2, and return what it
    says."""
    for name, content in row.get("files", {}).items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
        assert octet(*shlex.split(row["command"])) == 2
    return said.getvalue().removeprefix("octet: ").rstrip("\n")


@pytest.mark.parametrize("row", SETTINGS, ids=lambda row: row["settings"])
def test_the_setting_is_named_and_the_sentence_is_the_one_that_was_read(row):
    error = refused(row["settings"])
    assert (error.key, str(error)) == (row["key"], row["says"])
    assert "k3y" not in str(error)  # which stands in some rows for a key


@pytest.mark.parametrize("row", COMMANDS, ids=lambda row: row["command"])
def test_a_command_that_is_refused_says_why(row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # in which argparse prints what it refuses
    assert said_by(row) == row["says"]
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {name for name in left if not name.startswith("__pycache__")} == {*row.get("files", [])}


@pytest.mark.parametrize(("key", "reason"), [(key, reason.partition("{")[0]) for key, _, reason, _ in conflicts.RULES])
def test_each_rule_about_several_settings_refuses_something(key, reason):
    assert any(row["key"] == key and f": {reason}" in row["says"] for row in SETTINGS)


def write_anew() -> None:
    def on_a_line(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, '"' if "\n" in text else None)

    yaml.SafeDumper.add_representer(str, on_a_line)
    for row in SETTINGS:
        error = refused(row["settings"])
        row |= {"key": row.get("key", error.key), "says": str(error)}
    os.environ["COLUMNS"] = "80"
    for row in COMMANDS:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            row["says"] = said_by(row)
    options: dict[str, Any] = {"default_flow_style": True, "sort_keys": False, "width": 1 << 20, "allow_unicode": True}
    FILE.write_text("".join(f"- {yaml.safe_dump(row, **options)}" for row in TABLE))


if __name__ == "__main__":
    write_anew()
