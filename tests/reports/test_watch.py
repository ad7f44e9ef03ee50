"""The screen about runs: what is on it, and that nothing a model wrote acts on the terminal."""

import io
import os
import re
import shutil
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.conftest import ROOT, lines_of, said_by, write_lines
from tests.reports.conftest import change, configure, going_on
from tests.terminal import on_a_terminal, read
from trainer.machine.console import Console
from trainer.reports.terminal import blocks, clock, of_folder
from trainer.run_folder.reader import read_run
from trainer.run_folder.stopped import stopped


def test_what_is_shown_of_a_run_that_has_ended_and_of_one_that_has_only_begun(finished, only_settings, capsys):
    with going_on(only_settings):
        assert "step 0 of 6, no step is logged yet" in said_by(capsys, "watch", only_settings)[1]
        shutil.copytree(finished, only_settings / "warmup", ignore=shutil.ignore_patterns("verdict.json"))
        configure(only_settings, warmup__steps=6)
        said = said_by(capsys, "watch", only_settings)[1]
        assert ("started, warm-up" in said, "step 6 of 6" in said) == (True, True)
    said = said_by(capsys, "watch", finished)[1]
    rows = [f"│ {name:<9} " for name in ("reward", "accuracy", "held-out", "tokens", "entropy")]
    assert [text for text in ("step 6 of 6, ended", "verdict: ", "last bad, step", *rows) if text not in said] == []
    assert "\x1b" not in said


def test_an_answer_of_graded_rewards_is_good_if_it_earned_more_than_the_mean(copied):
    folder = copied("graded")
    sample = {key: value for key, value in lines_of(folder / "samples.jsonl")[0].items() if key != "reward/correct"}
    write_lines(folder / "samples.jsonl", [sample | {"reward": reward} for reward in (0.9, 0.8, 0.02, 0.01)])
    write_lines(folder / "metrics.jsonl", [one | {"reward/mean": 0.5} for one in lines_of(folder / "metrics.jsonl")])
    shown = read_run(folder).last_samples()
    assert {name: one["reward"] for name, one in shown.items()} == {"last good": 0.8, "last bad": 0.01}


def test_a_run_that_goes_on_says_how_long_it_takes(copied, capsys):
    folder = copied("running")
    (folder / "verdict.json").unlink()
    records = lines_of(folder / "metrics.jsonl")[:4]
    for record in records[1:]:
        record.update({name: 0.0 for name in record if name.startswith("time/")})
        record.update({"time/rollout": 30.0, "time/reward": 10.0, "time/reward/correct": 9.0})
    write_lines(folder / "metrics.jsonl", records)
    with going_on(folder):
        assert "step 3 of 6, 2:00 of training left, last step at " in said_by(capsys, "watch", folder)[1]


@pytest.fixture
def broken_off(copied):
    """A run that was killed after three steps, five minutes ago."""
    folder = copied("broken-off")
    (folder / "verdict.json").unlink()
    write_lines(folder / "metrics.jsonl", lines_of(folder / "metrics.jsonl")[:4])
    for path in folder.iterdir():
        os.utime(path, (time.time() - 300,) * 2)
    return folder


def test_a_run_that_was_stopped_says_so(broken_off, monkeypatch, tmp_path):
    killed = "stopped after step 3 without saving it, because it failed or was killed; it "
    assert stopped(read_run(broken_off)) == f"{killed}starts again"
    (broken_off / "checkpoints/step_000002").mkdir(parents=True)
    assert stopped(read_run(broken_off)) == f"{killed}continues after step 2"
    (broken_off / "checkpoints/step_000003").mkdir()
    assert stopped(read_run(broken_off)) == "stopped after step 3"
    places = [("/", "nfs4")]  # of several mounts on one place, the last is on top

    def mounts(all: bool) -> list[SimpleNamespace]:
        return [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in places]

    monkeypatch.setattr(psutil, "disk_partitions", mounts)
    assert stopped(read_run(broken_off)) == "nothing was written for 5 min"
    spaced = shutil.copytree(broken_off, tmp_path / "a b" / "run")
    os.utime(spaced / "config.yaml")
    places += [(f"{tmp_path}/a b", "nfs4"), ("/", "ext4")]
    assert stopped(read_run(spaced)) is None, "it is on the server, and has just written"
    assert stopped(read_run(broken_off)) == "stopped after step 3", "it is on this machine"
    places.append(("/", "nfs4"))
    records = lines_of(broken_off / "metrics.jsonl")
    write_lines(broken_off / "metrics.jsonl", [*records[:-1], records[-1] | {"time/evaluation": 150.0}])
    for path in broken_off.iterdir():
        os.utime(path, (time.time() - 300,) * 2)
    assert stopped(read_run(broken_off)) is None  # it may evaluate, on another node
    shutil.copytree(broken_off, tmp_path / "run/warmup")
    shutil.copy2(broken_off / "config.yaml", tmp_path / "run")
    configure(tmp_path / "run", warmup__steps=6)
    os.utime(tmp_path / "run/config.yaml", (time.time() - 300,) * 2)
    assert stopped(read_run(tmp_path / "run")) is None  # so may its warm-up
    (tmp_path / "run/warmup/verdict.json").touch()
    assert stopped(read_run(tmp_path / "run")) == "nothing was written for 5 min"
    with going_on(broken_off):
        assert stopped(read_run(broken_off)) is None


def test_a_terminal_shows_it_until_the_run_was_stopped(broken_off):
    command = [sys.executable, "-m", "trainer.commands.main", "watch", str(broken_off)]
    with going_on(broken_off):
        process, terminal = on_a_terminal(command, ROOT, 100, 40)
        said = b""
        while b"last step at" not in said:
            said += read(terminal)
    said += b"".join(iter(lambda: read(terminal), b""))
    os.close(terminal)
    assert process.wait(60) == 0
    assert b"\x1b[?1049h" in said  # the alternate screen, and back
    assert "step 3 of 6, stopped after step 3" in said.rpartition(b"\x1b[?1049l")[2].decode()


def test_memory_stands_beside_its_plan_and_once_where_it_is_the_same_in_all_phases(copied, capsys):
    folder = copied("even")
    log = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(re.sub(r'("memory/\w+": )[\d.e-]+', r"\g<1>0.774", log))
    assert re.search(r"│ memory +0\.77 GB +│", said_by(capsys, "watch", folder)[1])
    (folder / "memory_plan.json").write_text('{"step": 4500000000}')
    assert re.search(r"memory .*step 0\.77 of 4\.50 planned", said_by(capsys, "watch", folder)[1])


@pytest.mark.parametrize(("width", "height"), [(80, 19), (60, 14), (120, 35), (80, 6), (34, 30), (24, 30)])
def test_a_run_fits_the_terminal_of_its_screen(finished, width, height):
    console = Console(file=io.StringIO(), width=width, force_terminal=True)
    lines = console.render_lines(of_folder(finished, console, height))
    assert len(lines) <= height
    assert "step 6 of 6" in "".join(segment.text for line in lines for segment in line)


def test_several_runs_and_their_alarms(finished, copied, capsys):
    folder = copied("alarm")
    change(folder / "metrics.jsonl", empty=0.9)
    said = said_by(capsys, "watch", finished, folder, "--once")[1]
    assert said.count("step 6 of 6") == 2
    assert said.count("! since step 5: empty answers: 90% of the answers are empty.") == 1


def test_blocks_and_times():
    assert (blocks([0.0, 1.0]), blocks([2.0] * 3), blocks([float("nan")])) == ("▁█", "▅▅▅", "")
    assert len(blocks(list(range(1000)))) == 40
    assert (clock(61), clock(3661)) == ("1:01", "1:01:01")
