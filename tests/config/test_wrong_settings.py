"""Any value of any setting, and any bytes of a file, is taken or is one short error."""

import os
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from tests.conftest import refuses
from trainer.config.read_yaml import BadYaml, read_yaml
from trainer.config.resolve import _parsed, overrides_of, resolve
from trainer.config.settings import fields
from trainer.errors import ConfigError

ODD = ["!!int x", "!!timestamp x", "!!bool x", "!!binary x", "!!set {a}", "&a [*a]", "<<: x", "2024-13-45", "~none/x"]
ODD += ["9" * 4301, "0x" + "f" * 4000, "[" * 2000, "x" * 5000, "'\x1b[2J'", '"\\x1b[2J"', '"\\0"', '"\\ud800"']
ODD += ["http://[::1", "1e999", "{[1]: 2}", "{null: 1}", "null", "[]", "{}", "true", "-1", "1.5", "?", "- a\n- b"]
FILES = [b"\xff\xfe", b"run:\n  dir: \xff", b"1: 2", b"null: 1", b"[1]", b"reward: 3", b"? [a]\n: b", b"run: {1: 2}"]
FILES += [b"\0", b"x: &x {y: *x}", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]"]
FILES += [b"[" * 2000, b"{a: " * 2000, b"x" * (1 << 21)]


def tried(count: int, *values: st.SearchStrategy[object]):
    """Try a test with so many values, which are the same ones in every run."""
    return lambda test: seed(18)(settings(max_examples=count, database=None)(given(*values)(test)))


def must_be_short(error: ValueError) -> None:
    text = str(error)
    assert 0 < len(text) < 2000
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", text), text
    text.encode()


@tried(200, st.sampled_from(fields()), st.sampled_from(ODD) | st.text(max_size=20))
def test_any_value_of_any_setting_is_taken_or_refused(key, value):
    try:
        resolve("nano", None, [f"{key}={value}"]).to_yaml().encode()
    except ConfigError as error:
        must_be_short(error)


TEXTS = ("run.dir", "model.name", "model.revision", "task.path", "prompt.system", "reward.judge.rubric", "lora.start")
LISTS = ("rollout.stop", "reward.custom", "task.incorrect", "rollout.vllm.arguments")
# fmt: off
SHORTENED = [
    "runs/run #2", "&a", "&a b", "!tag", "!!str x", "a:", "a: b", "- a", "new\nline", " a ", "# a", "|\n a", ">-\n a",
    "'a' # b", "\"a\" # \"", "[a] # ]", "[a\n b]", "[&x a]", "[!!str a]", "{a: b} #}", "null # a", "~ # a", "--- a",
    "''", "'it''s'", "%a", "? a", "a\u2028b", "a\x85b", "1:30", "1_0", "yes", "2024-01-01", "=", "<<", "", " ", "\t",
    "!!binary YQ==",
]
# fmt: on


def arrived(key: str, value: str) -> object:
    """The value of a setting that was typed as this, before it is judged; ConfigError if it is refused."""
    section, _, name = key.partition(".")
    nested = _parsed(f"{key}={value}")[section]
    for part in name.split("."):
        nested = nested[part]
    return nested


@tried(
    300,
    st.sampled_from(TEXTS),
    st.sampled_from(SHORTENED) | st.text(alphabet="&*!?:-[]{}|>'\"#%@`,= \n\tab0.~<é\u2028", max_size=12),
)
@example("run.dir", "runs/run #2")
def test_a_text_arrives_as_it_was_typed_or_is_refused(key, value):
    try:
        found = arrived(key, value)
    except ConfigError:
        return
    if value[0] in ("'", '"'):
        assert (value.rstrip()[-1], yaml.safe_load(value), len(value.splitlines())) == (value[0], found, 1)
    elif isinstance(found, str | None):
        assert found == (os.path.expanduser(value) if value[0] == "~" else value) or value in ("null", "~")
    else:
        with pytest.raises(ConfigError):
            resolve("nano", None, [f"{key}={value}"])


@pytest.mark.parametrize("key", LISTS)
@pytest.mark.parametrize("value", [value for value in SHORTENED if value[:1] in ("[", "{")])
def test_a_list_arrives_whole_or_is_refused(key, value):
    with refuses(key, names="quotes"):
        arrived(key, value)


@tried(200, st.text(max_size=30) | st.sampled_from(SHORTENED) | st.lists(st.text(max_size=9), max_size=3))
def test_a_value_that_a_command_writes_arrives(value):
    (written,) = overrides_of({"rollout.stop": value})
    assert len(written.splitlines()) == 1
    assert arrived(*written.split("=", 1)) == (os.path.expanduser(value) if value[:1] == "~" else value)


NAMES = st.text(max_size=30) | st.sampled_from(["x" * 5000, "\ud800", "run.", "run..steps", "run.steps.x"])


@tried(80, NAMES.filter(lambda key: "=" not in key))  # what follows it would be a value
def test_any_name_of_a_setting_is_refused_if_it_is_none(key):
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


@tried(150, st.binary(max_size=60) | st.text(alphabet="&*!?:-[]{}|>'\"#%@`, \nabc0.~<", max_size=40).map(str.encode))
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
