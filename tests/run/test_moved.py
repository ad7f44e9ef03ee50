"""A run is read from any working folder, and after a copy to a place where its data is not."""

import os
import shutil
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from tests.commands.conftest import write
from tests.conftest import refuses
from tests.e2e import short_job
from trainer.config.paths import data_files, file_of
from trainer.config.resolve import resolve
from trainer.machine import disk, user_code
from trainer.machine.http_client import read_key
from trainer.model.load import load_tokenizer
from trainer.reward.programs import refuse_unheld
from trainer.rollout.agents.sampler import Agents
from trainer.run_folder import create
from trainer.sandbox.confine import Held

FEW = ["rollout.problems=2", "rollout.group_size=2", "rollout.max_new_tokens=16", "eval.problems=4", "run.merge=false"]
OWN = ["task.name=records", "task.path=mine.csv", "task.holdout=0.4", "reward.custom=mine.py:brief"]
OWN += ["reward.weights={correct: 1}"]  # so that an evaluation needs no function
TRAIN = ["train", "--preset", "nano", *FEW, *OWN]


def octet(folder, *command):
    """Run a command in a folder, and return its status and what it has printed."""
    done = short_job.octet(folder, *command, input="2+3?\n\n")
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one step on a table, with a reward in a file, in a folder beside an empty one."""
    folder = tmp_path_factory.mktemp("moved")
    (folder / "elsewhere").mkdir()
    rows = "".join(f"What is {one}+{one}?,{2 * one}\n" for one in range(1, 11))
    reward = "from helper import WORTH\n\ndef brief(completions, **_):\n    return [WORTH for _ in completions]\n"
    files = {"mine.csv": f"question,answer\n{rows}", "helper.py": "WORTH = 0.0\n", "mine.py": reward}
    write(folder / "home", files)
    status, said = octet(folder / "home", *TRAIN, "run.steps=1", "eval.every=1", "run.dir=it")
    assert status == 0, said
    return folder / "home/it"


def test_small_data_are_in_the_run_and_its_paths_do_not_depend_on_where_it_was_started(run):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["task"]["path"] == "given/path/mine.csv"
    assert settings["reward"]["custom"] == [f"{run.parent}/mine.py:brief"]
    assert (run / "given/path/mine.csv").read_bytes() == (run.parent / "mine.csv").read_bytes()


def test_a_file_with_the_characters_of_a_pattern_is_itself(tmp_path):
    write(tmp_path, {"rows[1].csv": "a\n", "rows1.csv": "b\n"})
    assert data_files(tmp_path / "rows[1].csv") == [tmp_path / "rows[1].csv"]


@pytest.mark.parametrize(("path", "kept"), [
    ("set", "given/path/set"), ("set/data/train-*.parquet", "given/path/train-*.parquet"), ("s*/data/*.parquet", None),
])  # fmt: skip
def test_small_data_in_several_files_are_in_the_run(tmp_path, path, kept):
    parts = {f"set/data/train-{index}.parquet": f"{index}" for index in range(2)}
    write(tmp_path, parts)
    (tmp_path / "it").mkdir()
    create.write_config(tmp_path / "it", resolve("nano", None, ["task.name=records", f"task.path={tmp_path}/{path}"]))
    named = yaml.safe_load((tmp_path / "it/config.yaml").read_text())["task"]["path"]
    assert named == (kept or f"{tmp_path}/{path}")
    copies = sorted(file.read_text() for file in (tmp_path / "it").rglob("*.parquet"))
    assert copies == (["0", "1"] if kept else [])


@pytest.mark.slow
def test_a_run_is_evaluated_and_resumed_from_another_working_folder(run, tmp_path):
    copy, elsewhere = shutil.copytree(run, tmp_path / "it"), run.parents[1] / "elsewhere"
    (copy / "eval").symlink_to(elsewhere)
    status, said = octet(elsewhere, "eval", copy)
    assert (status, "/eval: it is a link" in said, [*elsewhere.iterdir()]) == (2, True, []), said
    (copy / "eval").unlink()
    status, said = octet(elsewhere, "eval", copy)
    assert status == 0, said
    named = f"reward.custom={run.parent}/mine.py:brief"
    status, said = octet(elsewhere, "train", "--resume", copy, "run.steps=2", named)
    assert (status, "step 2" in said) == (0, True), said
    # the same command, in the folder of the data, is still the same run
    status, said = octet(run.parent, *TRAIN, "run.steps=2", "eval.every=1", f"run.dir={copy}")
    assert (status, "other settings" in said) == (0, False), said


def test_it_moves_without_its_data_and_its_code_which_is_run_if_it_is_named(run, tmp_path):
    home, run = run, shutil.copytree(run, tmp_path / "far/it")
    code = [home.parent / "mine.py", home.parent / "helper.py"]
    hidden = [(path, path.rename(path.with_suffix(".away"))) for path in code]
    resume, named = ["train", "--resume", run, "run.steps=2"], f"reward.custom={run}/given/code/mine.py:brief"
    try:
        status, said = octet(tmp_path, "eval", run)  # which counts right answers, and calls no reward
        assert status == 0, said
        status, said = octet(tmp_path, *resume)
        assert (status, f"the command uses it if it has {named}" in said) == (2, True), said
        status, said = octet(tmp_path, *resume, named)
        assert (status, "after step 2" in said, "not kept" in said) == (0, True, False), said
    finally:
        for path, away in hidden:
            away.rename(path)


def test_files_of_one_name_have_a_copy_each_and_a_copy_in_use_is_kept(tmp_path):
    run, code = tmp_path / "run", [tmp_path / name / "mine.py" for name in "abc"]
    for file in code:
        file.parent.mkdir()
        file.write_text(f"# {file.parent.name}")
    settings = resolve("nano", None, [f"reward.custom=[{code[0]}:f,{code[1]}:g]"])
    create._copy_code(settings, run)
    (run / "config.yaml").write_text(settings.to_yaml(run))
    for file in code[:2]:
        file.unlink()
    found = resolve(str(run / "config.yaml"), None, []).reward.custom
    assert [Path(file_of(text)).read_text() for text in found] == ["# a", "# b"]
    create._copy_code(resolve("nano", None, [f"reward.custom=[{found[0]},{found[1]},{code[2]}:h]"]), run)
    assert [Path(file_of(text)).read_text() for text in found] == ["# a", "# b"]


def nested(key: str, value: object) -> object:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


AWAY = ["away.py", "~/away.py", "{run}/../away.py"]  # in the working folder, in the home folder, and anywhere else


@pytest.mark.parametrize("setting", ["reward.custom", "task.tools", "task.name", "task.mix"])
@pytest.mark.parametrize(
    "named", ["given/code/mine.py", "mine.py", "../mine.py", "{run}/mine.py", "/gone/mine.py", *AWAY]
)
def test_code_that_only_a_run_folder_names_is_not_run(tmp_path, setting, named, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run, ran = tmp_path / "stranger", tmp_path / "ran"
    copy = (run / "given/code/mine.py") if "gone" in named else run / named.format(run=run)
    copy = tmp_path / "away.py" if named in AWAY else copy
    (run / "given/code").mkdir(parents=True)
    copy.write_text(f"open({str(ran)!r}, 'w').close()\n\ndef brief(completions, **_):\n    return [0.0]\n")
    code = named.format(run=run) + ":brief"
    value = {"reward.custom": [code], "task.tools": [code], "task.name": code, "task.mix": {code: 1.0}}[setting]
    (run / "config.yaml").write_text(yaml.safe_dump(nested(setting, value)))
    value = attrgetter(setting)(resolve(str(run / "config.yaml")))
    (found,) = [value] if isinstance(value, str) else value
    assert (Path(file_of(found)).expanduser().absolute() == copy) or named in AWAY
    with refuses(setting, names="somebody else"):
        user_code.load(setting, found)
    assert not ran.exists()
    typed = {"task.name": found, "task.mix": f"{{'{found}': 1}}"}.get(setting, f"[{found}]")
    resolve(str(run / "config.yaml"), None, [f"{setting}={typed}"])
    assert user_code.load(setting, found)([""]) == [0.0]
    assert ran.exists()


def test_the_remedy_for_code_of_a_stranger_has_the_whole_setting(tmp_path):
    codes = [f"given/code/{name}.py:{name}" for name in "ab"]
    write(tmp_path, {f"given/code/{name}.py": f"def {name}(completions): ...\n" for name in "ab"})
    write(tmp_path, {"config.yaml": {"reward": {"custom": codes}}})
    found = resolve(str(tmp_path / "config.yaml")).reward.custom
    with refuses("reward.custom", names=f'={[*found]}"'):
        user_code.load("reward.custom", found[0])


SERVERS = {"reward.judge.url": "http://a.example/v1", "teacher.url": "http://b.example"}
SERVERS |= {"rollout.vllm.urls": "http://c.example"}
MORE = {"reward.judge.url": ["reward.judge.model=m", "reward.weights={judge: 1}"], "teacher.url": ["teacher.name=m"]}
MORE |= {"rollout.vllm.urls": ["rollout.engine=vllm_server"], "model.trust_remote_code": ["model.name=nano"]}
USES = {key: lambda config, setting: read_key("VLLM_API_KEY", setting) for key in SERVERS}
USES["task.agent"] = USES["task.agent (code)"] = lambda config, setting: Agents(config.task.agent, print).close()
USES["model.trust_remote_code"] = lambda config, setting: load_tokenizer(config.model)
USES["reward.code.unsafe"] = lambda config, setting: refuse_unheld(config.reward.code, Held(9, True, True, True))


@pytest.mark.parametrize("name", USES)
def test_nothing_is_run_or_let_in_and_no_key_is_sent_as_only_a_run_folder_says(tmp_path, name, monkeypatch):
    monkeypatch.setattr(user_code, "named", set())
    run, ran, use, key = tmp_path / "stranger", tmp_path / "ran", USES[name], name.split()[0]
    values = SERVERS | {"task.agent": f"touch {ran}", "task.agent (code)": "given/agent.py:go"}
    stored, value = str(run / "config.yaml"), values.get(name, "true")
    agent = f"open({str(ran)!r}, 'w').close()\n\ndef go(problem): ...\n"
    write(run, {"given/agent.py": agent, "config.yaml": nested(key, yaml.safe_load(value))})
    setting = f"{key}={run}/{value}" if "(code)" in name else f"{key}={value}"
    config = resolve(stored, None, MORE.get(key, ()))
    assert key not in SERVERS or use(config, setting) == ""  # there is no key yet
    monkeypatch.setenv("VLLM_API_KEY", "a-key-of-mine")
    with refuses(key, names="somebody else"):
        use(config, setting)
    assert not ran.exists()
    found = use(resolve(stored, None, [setting, *MORE.get(key, ())]), setting)
    assert key not in SERVERS or found == "a-key-of-mine"


def test_a_run_that_was_made_here_is_trusted_and_its_copy_or_that_of_another_user_is_not(tmp_path, monkeypatch):
    run, key = tmp_path / "mine", "task.agent={}/given/agent.py:go"
    write(run, {"given/agent.py": ""})
    create.write_config(run, resolve("nano", None, [key.format(run)]))
    copy = shutil.copytree(run, tmp_path / "theirs")
    for folder, expected in ((run, nullcontext()), (copy, refuses("task.agent", names="somebody else"))):
        setting = key.format(folder)
        assert resolve(str(folder / "config.yaml")).task.agent == setting.partition("=")[2]
        with expected:
            user_code.must_be_named(setting)
    assert disk.is_made_here(run)
    monkeypatch.setattr(os, "geteuid", lambda: run.stat().st_uid + 1)
    assert not disk.is_made_here(run)


def test_chat_and_export_need_no_data_and_what_is_missing_is_named(run, tmp_path):
    run = shutil.copytree(run, tmp_path / "far/it")
    shutil.rmtree(run / "given")
    missing = "task.path=given/path/mine.csv: there is no such file"
    status, said = octet(tmp_path, "chat", run)
    assert (status, "adapter ─" in said, missing in said, "Write task.path=FILE" in said) == (0, True, True, True), said
    status, said = octet(tmp_path, "export", run, "--to", "safetensors", "--no-check")
    assert status == 0, said
    status, said = octet(tmp_path, "eval", run)
    assert (status, missing in said) == (2, True), said
