"""What a checkpoint was made from, compared with what a run that resumes is made from."""

import importlib
import json
import os
import shutil
import sys
import zlib
from pathlib import Path

import pytest

from tests.commands.conftest import write
from tests.conftest import ran, refuses
from trainer.config.resolve import resolve
from trainer.config.settings import Config, Model
from trainer.errors import CheckpointError, DataError
from trainer.records import Problem
from trainer.run_folder.provenance import Provenance, checksums, code_of, shared


def origin(name: object) -> Provenance:
    return Provenance(Config(model=Model(name=str(name))), Path("no-folder"), [], [], accepts=False)


def test_other_weights_are_refused(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    saved = origin(model).state()
    origin(model).load(saved)
    *content, last = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(bytes([*content, last ^ 1]))
    with refuses("model.name", CheckpointError, names="weights"):
        origin(model).load(saved)


def test_other_versions_are_said(capsys):
    saved = origin("nano").state()
    saved["versions"]["torch"] = "1.0"
    origin("nano").load(saved)
    assert "the checkpoint was written with torch 1.0: the run continues" in capsys.readouterr().err
    origin("some/where").load(saved)  # weights that are not on this machine are not compared


def problems(*golds: str) -> list[Problem]:
    return [Problem(f"records/train/{number}", "q", gold) for number, gold in enumerate(golds)]


def made_from(folder, training, held_out=(), settings=(), accepts=False) -> Provenance:
    config = resolve("nano", None, ["task.name=records", "task.path=rows.jsonl", *settings])
    return Provenance(config, folder, training, held_out, accepts)


OTHERS = [("124", "", "records/train/2 is not what it was (1 of 3 training problems)")]
OTHERS += [("12", "", "2 training problems; the run had 3"), ("321", "", "the order of the training problems")]
OTHERS += [("123", "9", "the held-out problems differ")]


@pytest.mark.parametrize(("golds", "held_out", "told"), OTHERS)
def test_other_data_are_refused_and_the_first_record_of_them_is_kept(tmp_path, golds, held_out, told):
    first = made_from(tmp_path, problems(*"123"))
    record = json.dumps({"checksums": checksums(problems(*"123"))})
    (tmp_path / "data.json").write_text(record)
    saved = json.loads(json.dumps(first.state()))
    made_from(tmp_path, problems(*"123")).load(saved)
    changed = made_from(tmp_path, problems(*golds), problems(*held_out))
    with refuses("task.path", DataError, names=told):
        changed.load(saved)
    assert (tmp_path / "data.json").read_text() == record
    (tmp_path / "data.json").unlink()
    with refuses("task.path", DataError, names="problems"):
        changed.load(saved)


def test_each_file_of_the_user_that_a_run_depends_on_is_compared(tmp_path, monkeypatch, capsys):
    """Also a module that the file of a reward imports from its folder, and one of the same name in another folder."""
    monkeypatch.chdir(tmp_path)
    names = ("a/rw.py", "b/rw.py", "b/own_helper_of_rw.py", "task.py", "ds.json", "start/adapter_config.json")
    write(tmp_path, dict.fromkeys(names, "{}"))
    monkeypatch.syspath_prepend(tmp_path / "b")
    importlib.import_module("own_helper_of_rw")
    files = ["reward.custom=[a/rw.py:f, b/rw.py:g]", "task.mix={task.py:make: 1, nano: 1}"]
    files += ["engine.ds_config=ds.json", "lora.start=start"]
    saved = made_from(tmp_path, [], settings=files).state()
    assert len(saved["files"]) == 6
    for name in saved["files"]:
        before = Path(name).read_text()
        Path(name).write_text("{} ")
        with refuses(name, names="--accept-changes"):
            made_from(tmp_path, [], settings=files).load(saved)
        made_from(tmp_path, [], settings=files, accepts=True).load(saved)
        assert f"{name}: changed since this run began, which --accept-changes accepts" in capsys.readouterr().err
        Path(name).write_text(before)
    made_from(tmp_path, [], settings=files).load(saved)


def test_a_long_or_odd_text_among_the_settings_is_no_file(tmp_path):
    settings = ["prompt.system=" + "the of and " * 30, "rollout.stop=~~~"]
    assert made_from(tmp_path, [], settings=settings).state()["files"] == {}


ODD = """
class Grid: ...
from trainer.records import Problem
from trainer.run_folder.provenance import checksums
at = {(0, 1): Grid(), frozenset("abcd"): 1, "allowed": {"a", "b", "c", "d"}}
extra = {"at": at, "it": Grid(), "set": {"a", "b", "c", "d"}}
print(checksums([Problem("p", "q", "1", "", extra), Problem("p", "q", "1", "", {"set": {"e"}})]))
"""


def test_a_value_that_is_not_json_has_one_checksum_in_every_process():
    one, other = (ran(sys.executable, "-c", ODD, env=os.environ | {"PYTHONHASHSEED": seed}).stdout for seed in "15")
    assert one == other
    assert len({one[:8], one[8:16]}) == 2


def test_files_of_the_user_are_copied_and_installed_packages_are_not(tmp_path, monkeypatch):
    write(tmp_path, {".local/site-packages/odd_package_of_mine.py": ""})
    monkeypatch.syspath_prepend(tmp_path / ".local/site-packages")
    importlib.import_module("odd_package_of_mine")
    write(tmp_path, dict.fromkeys(("reward.py", "other.py", "asked.txt"), "{question}"))
    files = [f"reward.custom=[{tmp_path}/reward.py:f,{tmp_path}/other.py:g]", f"prompt.style={tmp_path}/asked.txt"]
    files += [f"rollout.vllm.python={sys.executable}", "rollout.vllm.start=true"]  # no code of the user
    ((folder, names),) = code_of(resolve("nano", None, files)).items()
    assert (folder, sorted(map(str, names))) == (tmp_path, ["asked.txt", "other.py", "reward.py"])


def test_a_file_that_is_gone_is_a_change_and_one_that_is_not_imported_yet_is_none(tmp_path):
    helper = tmp_path / "helper.py"
    helper.write_text("x = 1")
    run = made_from(tmp_path, [])
    saved = run.state() | {"files": {str(helper): zlib.crc32(b"x = 1")}}
    run.load(saved)
    for change in (lambda: helper.write_text("x = 2"), helper.unlink, helper.mkdir):
        change()
        with refuses(helper, names="--accept-changes"):
            run.load(saved)


def test_a_run_is_known_by_what_its_steps_depend_on(tmp_path):
    def run_of(gold: str, *settings: str) -> str:
        return made_from(tmp_path, problems(gold), settings=settings).run

    assert run_of("1") == run_of("1", "run.steps=7")
    assert run_of("1") not in (run_of("1", "run.seed=7"), run_of("2", "run.steps=7"))
    resumed = made_from(tmp_path, problems("1"))
    resumed.load(resumed.state() | {"run": "of a version with other settings"})
    assert resumed.run == "of a version with other settings"


def test_problems_that_a_run_was_trained_on_are_counted(tmp_path):
    assert shared(tmp_path, problems(*"12")) == 0
    (tmp_path / "data.json").write_text(json.dumps({"checksums": checksums(problems(*"123"))}))
    assert shared(tmp_path, problems("3", "1", "9")) == 2
