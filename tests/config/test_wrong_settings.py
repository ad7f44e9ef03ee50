"""Settings that cannot be: each is one short error, whatever it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from trainer.config.command_line import resolve
from trainer.config.read_yaml import BadYaml, read_yaml
from trainer.config.settings import fields
from trainer.errors import ConfigError

TABLE = yaml.safe_load((ROOT / "tests/data/wrong_settings.yaml").read_text())
ODD = ["!!int x", "!!timestamp x", "!!bool x", "!!binary x", "!!set {a}", "&a [*a]", "<<: x", "2024-13-45", "~none/x"]
ODD += ["9" * 4301, "0x" + "f" * 4000, "[" * 2000, "x" * 5000, "'\x1b[2J'", '"\\x1b[2J"', '"\\0"', '"\\ud800"']
ODD += ["http://[::1", "1e999", "{[1]: 2}", "{null: 1}", "null", "[]", "{}", "true", "-1", "1.5", "?", "- a\n- b"]
FILES = [b"\xff\xfe", b"run:\n  dir: \xff", b"1: 2", b"null: 1", b"[1]", b"run: 3", b"? [a]\n: b", b"run: {1: 2}"]
FILES += [b"\0", b"x: &x {y: *x}", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"]
FILES += [b"[" * 2000, b"{a: " * 2000, b"x" * (1 << 21)]


def must_be_short(error: ValueError) -> None:
    text = str(error)
    assert 0 < len(text) < 2000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), text
    text.encode()


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong["settings"])
def test_the_message_of_each(wrong):
    overrides = re.split(r" (?=\w+\.[\w.]+=)", wrong["settings"])
    with pytest.raises(ConfigError) as refused:
        resolve("nano", None, overrides)
    assert str(refused.value) == wrong["says"]


@seed(18)
@settings(max_examples=200, database=None)
@given(st.sampled_from(fields()), st.sampled_from(ODD) | st.text(max_size=20))
def test_any_value_of_any_setting_is_taken_or_refused(key, value):
    try:
        resolve("nano", None, [f"{key}={value}"]).to_yaml().encode()
    except ConfigError as error:
        must_be_short(error)


@seed(18)
@settings(max_examples=80, database=None)
@given(st.text(max_size=30) | st.sampled_from(["x" * 5000, "\ud800", "run.", "run..steps", "run.steps.x"]))
def test_any_name_of_a_setting_is_taken_or_refused(key):
    with pytest.raises(ConfigError) as refused:
        resolve("nano", None, [f"{key}=[[1]]"])
    must_be_short(refused.value)


@pytest.fixture(scope="module")
def preset(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("presets") / "mine.yaml"


@pytest.mark.parametrize("content", FILES, ids=lambda content: repr(content[:20]))
def test_a_preset_of_any_bytes_is_refused(preset, content):
    preset.write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        resolve(str(preset))
    must_be_short(refused.value)


@seed(18)
@settings(max_examples=150, database=None)
@given(st.binary(max_size=60) | st.text(alphabet="&*!?:-[]{}|>'\"#%@`, \nabc0.~<", max_size=40).map(str.encode))
@example(b"a: !!timestamp x")
@example(b"!!map x")
@example(b'"\\e[31mx": 1\n"\\e[31mx": 2')
@example(b'"x\\ny": 1\n"x\\ny": 2')
@example(b"? %s\n: 1\n? %s\n: 2" % (b"x" * 300, b"x" * 300))
def test_yaml_of_any_bytes_is_a_value_or_a_line(content):
    try:
        read_yaml(content)
    except BadYaml as error:
        must_be_short(error)


@pytest.mark.parametrize(
    ("content", "key", "line"), [("a: 1\nb: 2\na: 1\n", "a", 3), ("{a: {b: 1,\nb: 2}}", "b", 2), ("1: a\n1: b", "1", 2)]
)
def test_a_key_that_is_written_twice_is_refused(content, key, line):
    with pytest.raises(BadYaml, match=f"^{key} is written twice, again in line {line}"):
        read_yaml(content)
