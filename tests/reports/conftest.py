"""A real short run, shared by the tests of this room, and copies of it to change."""

import fcntl
import json
import shutil
from contextlib import contextmanager

import pytest
import yaml

from tests.commands.conftest import write
from tests.conftest import lines_of, write_lines
from tests.e2e.short_job import train

FEW = ["--preset", "nano", "run.steps=6", "eval.every=3", "eval.problems=32", "rollout.problems=4", "run.merge=false"]
FEW += ["task.limit=256"]


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    train(folder, *FEW, "run.dir=demo")
    return folder / "demo"


@pytest.fixture
def copied(finished, tmp_path):
    """Copy the run under a name; what a test changes stays there."""

    def copy(name: str):
        ignored = shutil.ignore_patterns("checkpoints", "best", "tensorboard")
        return shutil.copytree(finished, tmp_path / name, ignore=ignored)

    return copy


def configure(folder, **changes: object) -> None:
    """Change settings of a run; `model__name` is model.name."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for name, value in changes.items():
        section, key = name.split("__")
        config[section][key] = value
    head = [line for line in (folder / "config.yaml").read_text().splitlines(keepends=True) if line.startswith("#")]
    (folder / "config.yaml").write_text("".join([*head, yaml.safe_dump(config)]))


def change(path, **values: object) -> None:
    """Give these values to the object in a file of JSON, or to each object in one of JSON lines."""
    if path.suffix == ".jsonl":
        write_lines(path, [record | values for record in lines_of(path)])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | values))


@contextmanager
def going_on(folder):
    """Hold the lock of the folder, as a run does until its process ends."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\x1b[31mred\x1b]0;title\x07"
HOSTILE += "\u202etxet\u2066\u200b [bold]markup[/bold] \ud800 </pre></style>&amp;"
EVIL = HOSTILE.replace("\ud800", "[/INST] :smile: \x1b[2J\x9b31m\r\x7f")  # what a file of UTF-8 can have


@pytest.fixture
def hostile(copied):
    """A run in whose every file, and in whose name, a text is out to take over whatever shows it."""
    folder = copied(HOSTILE.replace("/", "").replace("\ud800 ", ""))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["model"]["name"] = config["prompt"]["system"] = EVIL
    config["task"] |= {"name": "records", "path": f"{EVIL}.jsonl"}
    config["rollout"]["stop"] = ["[/INST]", EVIL]
    head = "# octet 0\u202e [bold] <script>, git revision abc;touch${IFS}x"  # YAML refuses control characters here
    (folder / "config.yaml").write_text(f"{head}\n{yaml.safe_dump(config)}")
    for name in ("eval.json", "machine.json", "verdict.json"):
        (folder / name).write_text(json.dumps(_poisoned(json.loads((folder / name).read_text()))))
    (folder / "adapter/export.json").write_text(json.dumps({"source": ".", "format": EVIL, "not_checked": EVIL}))
    change(folder / "samples.jsonl", completion=f"{HOSTILE} 12", prompt=HOSTILE, gold=HOSTILE, strict="12")
    flips = lines_of(folder / "eval_flips.jsonl")
    flips += [flips[0] | {"direction": direction} for direction in ("gained", "lost")]
    write_lines(folder / "eval_flips.jsonl", flips)
    names = ("question", "gold", "before_answer", "before_completion")
    change(folder / "eval_flips.jsonl", **dict.fromkeys(names, HOSTILE))
    return folder


def _poisoned(value):
    """Return the value with the text at the end of each text in it, but for the keys of mappings."""
    if isinstance(value, dict):
        return {key: _poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_poisoned(one) for one in value]
    return value + EVIL if isinstance(value, str) else value


@pytest.fixture
def only_settings(finished, tmp_path):
    """A run that has written its settings and nothing else yet."""
    return write(tmp_path / "started", {"config.yaml": (finished / "config.yaml").read_text()})
