"""A real short run, shared by the tests of this room, and copies of it to change."""

import fcntl
import os
import shutil
from contextlib import contextmanager

import pytest
import yaml

from tests.conftest import lines_of, write_lines
from tests.e2e.short_job import train

FEW = ["--preset", "nano", "run.steps=6", "eval.every=3", "eval.problems=32", "rollout.problems=4", "run.merge=false"]


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


@contextmanager
def going_on(folder):
    """Hold the lock of the folder, as a run does until its process ends."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


HOSTILE = "<script>document.title='taken'</script><img src=x onerror=alert(1)>\x1b[31mred\x1b]0;title\x07"
HOSTILE += "\u202etxet\u2066\u200b [bold]markup[/bold] \ud800 </pre></style>&amp;"


@pytest.fixture
def hostile(copied):
    """A run whose model, questions and prompts are out to take over whatever shows them."""
    folder = copied("hostile")
    samples, flips = lines_of(folder / "samples.jsonl"), lines_of(folder / "eval_flips.jsonl")
    for sample in samples:
        sample |= {"completion": f"{HOSTILE} 12", "prompt": HOSTILE, "gold": HOSTILE, "strict": "12"}
    flips += [flips[0] | {"direction": direction} for direction in ("gained", "lost")]
    for flip in flips:
        flip |= {"question": HOSTILE, "gold": HOSTILE, "before_answer": HOSTILE, "before_completion": HOSTILE}
    write_lines(folder / "samples.jsonl", samples)
    write_lines(folder / "eval_flips.jsonl", flips)
    return folder


@pytest.fixture
def only_settings(copied):
    """A run that has written its settings and nothing else yet."""
    folder = copied("started")
    for path in folder.iterdir():
        if path.name != "config.yaml":
            shutil.rmtree(path) if path.is_dir() else os.unlink(path)
    return folder
