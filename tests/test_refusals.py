"""What is refused, and with which words: data/refusals.yaml has a row for each, and holds the whole sentences.

`python -m tests.test_refusals` writes the sentences anew, after one was changed on purpose; `git diff` shows them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from trainer.config import rules
from trainer.config.command_line import resolve
from trainer.errors import ConfigError

FILE = ROOT / "tests/data/refusals.yaml"
TABLE: list[dict[str, Any]] = yaml.safe_load(FILE.read_text())


def refused(settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve("nano", None, re.split(r" (?=\w+\.[\w.]+=)", settings))
    return caught.value


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["settings"])
def test_the_setting_is_named_and_the_sentence_is_the_one_that_was_read(row):
    error = refused(row["settings"])
    assert (error.key, str(error)) == (row["key"], row["says"])


@pytest.mark.parametrize(("key", "reason"), [(key, reason.partition("{")[0]) for key, _, reason, _ in rules.RULES])
def test_each_rule_about_several_settings_refuses_something(key, reason):
    assert any(row["key"] == key and f": {reason}" in row["says"] for row in TABLE)


def write_anew() -> None:
    rows = []
    for row in TABLE:
        error = refused(row["settings"])
        rows.append({"settings": row["settings"], "key": row.get("key", error.key), "says": str(error)})
    lines = (
        yaml.safe_dump(row, default_flow_style=True, sort_keys=False, width=1 << 20, allow_unicode=True) for row in rows
    )
    FILE.write_text("".join(f"- {line}" for line in lines))


if __name__ == "__main__":
    write_anew()
