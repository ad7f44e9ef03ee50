"""The actions of the page without a browser: their commands, what they ask before, and what they show of failures."""

import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from tests.commands.conftest import config_of, write
from tests.conftest import ROOT, until
from tests.reports.conftest import going_on
from tests.ui.conftest import asking, does, serving
from trainer.commands.page.actions import ACTIONS
from trainer.commands.page.runs import Runs, held, shown
from trainer.commands.page.views import talk, waiting
from trainer.machine.installed_files import octet_here

NANO = {"--preset": "nano", "task.name": "nano"}


def test_every_action_has_a_command_before_it_is_asked_for(asked, folder, monkeypatch):
    monkeypatch.chdir(folder)
    octet = octet_here()
    write(folder / "runs/known", {"config.yaml": config_of()})
    given = NANO | {"name": "new", "--card": "8 GB", "--to": "gguf", "asked": "Is it 4?", "runs": ["known", "unborn"]}
    rows = [[name, {"process": 7}] for name in ACTIONS]
    texts = json.loads(asked("POST", "commands", json.dumps(given | {"rows": rows}))[2])
    found = dict(zip(ACTIONS, texts, strict=True))
    assert found["search"] == f"{octet} plan --preset nano --vram 8 --search task.name=nano"
    assert found["train"] == f"{octet} train --preset nano task.name=nano run.dir=runs/new"
    assert found["ask"] == f"{octet} chat runs/known 'Is it 4?'"
    assert found["export"] == f"{octet} export runs/known --to gguf"
    assert found["worth"].startswith("printf %s '{")
    assert all(text.startswith((f"{octet} ", "printf ", "kill ")) for text in found.values())
    assert not (folder / "runs/new").exists()
    untold = json.dumps({"--preset": "nano", "rows": [["look", {}]]})
    assert json.loads(asked("POST", "commands", untold)[2]) == [f"{octet} task show nano --model nano --preset nano"]
    recipe = {"--preset": "nano", "--recipe": "verl_gsm8k", "task.question": "Q", "rows": [["look", {}], ["worth", {}]]}
    looked, scored = json.loads(asked("POST", "commands", json.dumps(recipe))[2])
    of_recipe = "--preset nano --recipe verl_gsm8k task.question=Q"
    assert looked == f"{octet} task show gsm8k --model Qwen/Qwen2.5-1.5B-Instruct {of_recipe}"
    assert scored.endswith(f" | {octet} score - {of_recipe}")
    wrong = json.dumps(given | {"runs": [], "more": "'", "rows": [["export", {}], ["train", {}]]})
    said = [text.partition(":")[0] for text in json.loads(asked("POST", "commands", wrong)[2])]
    assert said == ["run", "More settings"]
    for rows in (7, [7], [["look"]], [["no such", {}]], [[[], {}]], [["look", 7]]):
        assert asked("POST", "commands", json.dumps({"rows": rows}))[0] == 400
    monkeypatch.setattr(sys, "prefix", f"{ROOT}/.venv")
    assert shown(["list"]) == f"{os.path.relpath(ROOT / '.venv/bin/octet')} list"


def test_only_a_column_that_is_known_is_offered(asked):
    assert asked("PUT", "upload?name=final.csv", "Question,Final Answer\n1 + 1?,2\n")[0] == 200
    given = {"--preset": "nano", "task.name": "records", "task.path": "runs/uploads/final.csv", "into": "sheet"}
    assert 'data-take="[&quot;task.question=Question&quot;]"' in does(asked, "look", **given)


def test_what_is_left_out_is_said_once(asked):
    rows = "".join(f"{one} + 0?,{one}\n" for one in range(40))
    assert asked("PUT", "upload?name=left.csv", f"question,answer\n{rows}1 + 0?,1\n")[0] == 200
    given = {"--preset": "nano", "task.name": "records", "task.path": "runs/uploads/left.csv", "into": "sheet"}
    said = does(asked, "look", **given)
    assert (said.count("left.csv:42"), ".." in said) == (1, False)


def test_a_wrong_card_is_named_without_the_usage_of_the_command(asked):
    said = does(asked, "models", **NANO, **{"--card": "1.2.3"}, into="models")
    assert ("invalid float value" in said, "usage" in said) == (True, False)


def test_a_run_that_is_stopped_while_it_loads_has_no_status(tmp_path):
    runs = Runs(tmp_path)
    runs.started["early"] = subprocess.Popen(["sleep", "600"])
    runs.stop("early")
    runs.started["early"].wait()
    assert "status" not in "".join(waiting(runs, "early"))


def test_a_conversation_shows_every_turn_of_an_answer():
    texts = ["look", "a wall", "north"]
    turns = [{"role": role, "text": text} for role, text in zip(["model", "environment", "model"], texts, strict=True)]
    answer = {"model": "base", "answer": "north", "strict": None, "lenient": None, "right": None, "turns": turns}
    asked = {"question": "Where to?", "gold": "", "answers": [answer]}
    chat = SimpleNamespace(answers=lambda: [asked], failure=lambda: "", process=SimpleNamespace(pid=7), asked=1)
    page = str(talk(chat))
    assert [page.count(text) for text in texts] == [1, 1, 1]


SLOW = """
import os, pathlib, time
pathlib.Path(f"waits-{os.getpid()}").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.1)
"""


def test_a_run_is_stopped_while_commands_take_long(asked, folder):
    (folder / "slow.py").write_text(SLOW)
    with ThreadPoolExecutor(3) as pool:
        for _ in range(2):
            pool.submit(does, asked, "look", **NANO | {"task.name": "slow.py:build"})
        until(lambda: len([*folder.glob("waits-*")]) == 2)
        stopped = pool.submit(does, asked, "stop", run="none")
        try:
            assert "there is no run of this name" in stopped.result(60)
        finally:
            (folder / "go").touch()


def test_a_run_beside_another_is_asked_about_first(asked, folder, tmp_path):
    given = NANO | {"name": "second", "into": "said"}
    with going_on(tmp_path):
        said = does(asked, "train", **given)
    assert f"The run {tmp_path} is in progress." in said
    assert "run.dir=runs/second" in said
    assert "beside" in said
    assert not (folder / "runs/second.log").exists()


def test_of_two_pages_that_start_a_run_of_one_name_one_does(asked, folder):
    given = NANO | {"name": "twin", "beside": "yes", "into": "said", "run.steps": "1000000"}
    with ThreadPoolExecutor(2) as pool:
        said = [*pool.map(lambda _: does(asked, "train", **given), range(2))]
    until(lambda: "stops" in does(asked, "stop", run="twin"))
    log = (folder / "runs/twin.log").read_text()
    refused = [one for one in said if "there is a run of this name" in one or "has been started already" in one]
    assert (len(refused), log.count("$ ")) == (1, 1)


def test_a_full_card_is_said_before_a_run_is_started(tmp_path):
    path = f"{ROOT / 'tests/cuda'}:{os.environ['PATH']}"
    with serving(tmp_path, PATH=path, CUDA_STUB_CONTEXT_GIB="7.2") as address:
        said = does(asking(address), "train", **NANO, name="full", into="said")
    assert "Another program holds 7.7 GB of CUDA stub 0: 0.9 of 8.6 GB free" in said
    assert os.listdir(tmp_path / "runs") == []


def test_a_log_that_cannot_be_written_is_said(asked, folder, tmp_path):
    (folder / "runs/linked.log").symlink_to(tmp_path / "other")
    assert "linked.log" in does(asked, "train", **NANO, name="linked", beside="yes", into="said")
    assert not (tmp_path / "other").exists()


def test_a_lock_that_is_shared_is_no_run_in_progress(tmp_path):
    with (tmp_path / ".lock").open("w") as lock, (tmp_path / "other").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert tmp_path not in held()
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert held()[tmp_path] == os.getpid()


def test_what_has_ended_a_run_is_shown_whoever_serves_the_page(asked, folder):
    log = (
        "$ octet train\noctet: warning: another program holds 7.7 GB\noctet: loading nano\noctet: out of memory (<b>)\n"
    )
    place = write(folder / "runs/failed", {"config.yaml": config_of("warmup.steps=30"), "../failed.log": log})
    (folder / "runs/unborn.log").write_text("$ octet train\noctet: there is no such file\n")
    live = asked("GET", "live?run=unborn")[2]
    assert 'data-pick="unborn"' in live
    assert '<p class="error">there is no such file</p>' in live
    (folder / "runs/stranger.log").write_text("of another program\n")
    write(folder / "runs/unborn", {".lock": ""})
    with (folder / "runs/unborn/.lock").open("w") as lock:  # as of a run that loads, and an earlier server has started
        fcntl.flock(lock, fcntl.LOCK_EX)
        live = asked("GET", "live?run=unborn&run=stranger")[2]
    assert ("It loads libraries" in live, "stranger" in live) == (True, False)
    live = asked("GET", "live?run=failed")[2]
    assert '<p class="error">out of memory (&lt;b&gt;)</p>' in live
    assert '<p class="soft">warning: another program holds 7.7 GB</p>' in live
    assert "octet train --resume runs/failed" in live
    with going_on(place):
        assert 'class="error"' not in asked("GET", "live?run=failed")[2]
    warmup = {"config.yaml": config_of("warmup.steps=30"), "metrics.jsonl": {"step": 7, "loss": 0.5}}
    write(place / "warmup", warmup)
    live = asked("GET", "live?run=failed")[2]
    assert "failed, warm-up" in live
    assert "Step 7 of " in live
    (place / "warmup/samples.jsonl").write_text('{"reward": 1}\n')  # of another version, or a stranger
    assert "failed: it is not as Octet writes it (KeyError: " in asked("GET", "live?run=failed")[2]
    (place / "config.yaml").unlink()
    (place / "config.yaml").symlink_to("/proc/self/mem")  # no user can read its beginning
    assert asked("GET", "live?run=failed")[0] == 200
