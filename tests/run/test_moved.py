"""A run is read from any working folder, and after a copy to a place where its data is not."""

import json
import os
import shutil
import subprocess

import pytest
import yaml

from tests.conftest import ROOT
from tests.forks import forked

FEW = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "eval.problems=4", "run.merge=false"]
PIPES = {"capture_output": True, "text": True, "input": "2+3?\n\n"}
OWN = ["task.name=records", "task.path=mine.csv", "task.holdout=0.4", "reward.custom=mine.py:brief"]


def octet(folder, *command):
    """Run a command in a folder, and return its status and what it has printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    program = [*forked(), "-m", "trainer.commands.main", *map(str, command)]
    done = subprocess.run(program, check=False, cwd=folder, env=environment, **PIPES)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step on a table, with a reward in a file, in a folder beside an empty one."""
    folder = tmp_path_factory.mktemp("moved")
    (folder / "home").mkdir()
    (folder / "elsewhere").mkdir()
    rows = "".join(f"What is {one}+{one}?,{2 * one}\n" for one in range(1, 11))
    (folder / "home/mine.csv").write_text(f"question,answer\n{rows}")
    (folder / "home/mine.py").write_text("def brief(completions, **_):\n    return [0.0 for _ in completions]\n")
    more = ["run.steps=1", "eval.every=1", "run.dir=it"]
    status, said = octet(folder / "home", "train", "--preset", "nano", *FEW, *OWN, *more)
    assert status == 0, said
    return folder / "home/it"


def test_small_data_are_in_the_run_and_its_paths_do_not_depend_on_where_it_was_started(run):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["task"]["path"] == "given/path/mine.csv"
    assert settings["reward"]["custom"] == [f"{run.parent}/mine.py:brief"]
    assert (run / "given/path/mine.csv").read_bytes() == (run.parent / "mine.csv").read_bytes()


def test_a_run_is_evaluated_and_resumed_from_another_working_folder(run, tmp_path):
    copy = tmp_path / "it"
    shutil.copytree(run, copy)
    elsewhere = run.parents[1] / "elsewhere"
    status, said = octet(elsewhere, "eval", copy)
    assert status == 0, said
    status, said = octet(elsewhere, "train", "--resume", copy, "run.steps=2")
    assert status == 0, said
    assert "step 2" in said
    # the same command, in the folder of the data, is still the same run
    more = ["run.steps=2", "eval.every=1", f"run.dir={copy}"]
    status, said = octet(run.parent, "train", "--preset", "nano", *FEW, *OWN, *more)
    assert (status, "other settings" in said) == (0, False), said


def test_it_moves_without_its_data(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "far/it")
    stored = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(stored.replace("/home/mine.py", "/gone/mine.py"))
    status, said = octet(tmp_path, "eval", run)
    assert status == 0, said
    status, said = octet(tmp_path, "train", "--resume", run, "run.steps=2")
    assert status == 2
    assert "/gone/mine.py" in said


def test_it_is_resumed_where_its_code_is_elsewhere_but_not_with_other_code(run, tmp_path):
    copy, code = shutil.copytree(run, tmp_path / "far/it"), run.parent / "mine.py"
    resume = ["train", "--resume", copy, "run.steps=2", f"reward.custom={tmp_path}/mine.py:brief"]
    moved = code.rename(tmp_path / "mine.py")
    content = moved.read_text()
    try:
        moved.write_text(content.replace("0.0", "1.0"))
        status, said = octet(tmp_path, *resume)
        assert (status, "mine.py: changed since this run began" in said) == (2, True), said
        moved.write_text(content)
        status, said = octet(tmp_path, *resume)
        assert (status, "after step 2" in said, "not kept" in said) == (0, True, False), said
        notes = [json.loads((folder / "best/best.json").read_text()) for folder in (run, copy)]
        assert notes[0]["run"] == notes[1]["run"]
    finally:
        moved.rename(code)


def test_chat_and_export_need_no_data_and_what_is_missing_is_named(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "far/it")
    shutil.rmtree(run / "given")
    status, said = octet(tmp_path, "chat", run)
    assert status == 0, said
    assert "adapter ─" in said
    assert "task.path=given/path/mine.csv: there is no such file. Write task.path=FILE" in said
    status, said = octet(tmp_path, "export", run, "--to", "safetensors", "--no-check")
    assert status == 0, said
    status, said = octet(tmp_path, "eval", run)
    assert status == 2
    assert "task.path=given/path/mine.csv: there is no such file" in said
