"""What the launcher passes on to its ranks, and what it says of their end: the real one of DeepSpeed, two ranks."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, is_running, launch, until
from trainer.commands import train
from trainer.machine import exits
from trainer.ranks import launch as launching

FEW = ["rollout.problems=2", "rollout.group_size=4", "rollout.max_new_tokens=16", "rollout.dead_groups=keep"]
FEW += ["run.steps=500", "eval.problems=0", "run.merge=false"]


def test_a_process_of_mpi_is_a_rank_and_starts_none(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    became = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.extend(words) or sys.exit(0))
    with pytest.raises(SystemExit):
        train.main(["--preset", "nano"])
    assert became[1:] == [str(train.TRAIN), "--preset", "nano"]


@contextmanager
def two_ranks(folder):
    """Two ranks below the launcher, which have done their first step, and what they have said until then."""
    command = [sys.executable, "-m", "tests.e2e.two_ranks", *FEW, "run.dir=it"]
    own = {"PYTHONPATH": str(ROOT), "VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env=os.environ | own, **pipes) as train:
        said = ""
        while "  1/500" not in said:
            line = train.stdout.readline()
            assert line, train.stderr.read()
            said += line
        yield train, said


@pytest.mark.slow
def test_sigusr1_reaches_the_ranks_and_not_the_launcher(tmp_path):
    """Slurm sends it to a task that has started the launcher; a second one arrives while the ranks stop."""
    with two_ranks(tmp_path) as (train, started):
        train.send_signal(signal.SIGUSR1)
        train.send_signal(signal.SIGUSR1)
        complained = train.communicate(timeout=300)[1]
    assert "on 2 x cpu" in started
    assert train.returncode == 75, complained
    assert "which is saved: SIGUSR1 was received" in complained
    assert (tmp_path / "it/checkpoints/latest").exists()


EARLY = """
import sys
from trainer.ranks import launch
rank = "import signal, time; signal.signal(signal.SIGUSR1, lambda *_: exit(75)); " + (
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1}); time.sleep(250)"
)
launcher = 'echo up; sleep 1; "$@"; exit $?'
sys.exit(launch.run(["bash", "-c", launcher, "bash", sys.executable, "-c", rank, str(launch.TRAIN)]))
"""


def test_a_signal_that_comes_before_there_is_a_rank_is_not_lost():
    """The stand-in for the launcher starts its rank a second later."""
    command = [sys.executable, "-c", EARLY]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as train:
        assert train.stdout.readline() == "up\n"
        train.send_signal(signal.SIGUSR1)
        assert train.wait(timeout=300) == 75


SAVING = """
import signal, sys, time
sys.path.insert(0, sys.argv[1])
from trainer.machine import exits
exits.listen()
try:
    with exits.finishing():
        print("up", flush=True)
        time.sleep(0.5)
        print("saved", flush=True)
    time.sleep(2)
    print("went on", flush=True)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


RUN = "import sys; from trainer.ranks import launch; sys.exit(launch.run(sys.argv[1:]))"


@pytest.mark.parametrize(("before", "number", "said", "status"), [
    ([], signal.SIGHUP, "saved\nstopped\n", 128 + signal.SIGHUP),
    ([], signal.SIGTERM, "saved\nstopped\n", 128 + signal.SIGTERM),
    (["nohup"], signal.SIGHUP, "saved\nwent on\n", 0),
])  # fmt: skip
def test_a_signal_lets_the_ranks_save_before_the_command_ends(before, number, said, status):
    """The stand-in for the launcher ends at once. A terminal that closes sends SIGHUP, which nohup ignores."""
    launcher = ["bash", "-c", '"$@"; exit $?', "bash", sys.executable, "-c", SAVING, str(ROOT)]
    command = [*before, sys.executable, "-c", RUN, *launcher]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        for _ in range(2):
            process.send_signal(number)
        process.wait(timeout=300)
        os.set_blocking(process.stdout.fileno(), False)
        assert process.stdout.read().decode() == said
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_the_status_after_a_signal_is_that_of_a_shell_also_if_the_run_ends_as_after_ctrl_c(number):
    only_rank = 'trap "exit 130" TERM; echo up; sleep 60 & wait'

    def listens() -> int:  # SIGALRM is the last signal that gets a handler
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
        return int(caught, 16) >> (signal.SIGALRM - 1) & 1

    command = [sys.executable, "-c", RUN, "bash", "-c", only_rank]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        until(listens)
        process.send_signal(number)
        assert process.wait(timeout=300) == 128 + number


LEAVES = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    time.sleep(1000)
else:
    open(os.environ["OCTET_END"], "w").close()
"""


def test_little_is_waited_for_after_a_run_that_has_ended_well():
    """It is said for what: a process that is deaf to SIGTERM, which is then ended. It has inherited standard output, on
    which whoever started the run may wait."""
    code = "import os, sys; from trainer.ranks import launch; launch.LEAVE_S, launch.LEFT_S = 600, 2; "
    code += "sys.exit(launch.run_to_its_end(sys.argv[1:], os.environ))"
    done = launch(sys.executable, "-c", code, sys.executable, "-c", LEAVES, timeout=300)
    assert done.returncode == 0
    assert done.stderr == "octet: waiting up to 2 s for processes that the run has started\n"


def test_a_run_ends_with_the_command_that_has_started_it():
    ends = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [sys.executable, "-c", RUN, sys.executable, "-c", ends]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        run = psutil.Process(int(process.stdout.readline()))
        process.kill()
    until(lambda: not is_running(run.pid))


RUN_EACH = """
import os, sys
from trainer.ranks import launch
for rank in sys.argv[1:]:
    print(launch.run_to_its_end(["bash", "-c", rank], os.environ), file=sys.stderr)
"""


def test_statuses_are_those_of_a_shell_and_silent_ends_are_explained():
    """247 is what is left of -9, with which the launcher of DeepSpeed leaves when signal 9 has ended a rank."""
    ends = {'touch "$OCTET_END"': "0", "exit 0": "1", "exit 2": "2", "exit 75": "75", "exit 130": "130"}
    ends |= {"kill -TERM $$": "143", "exit 247": "137", "kill -SEGV $$": "139", "exit 250": "134"}
    said = launch(sys.executable, "-c", RUN_EACH, *ends).stderr.splitlines()
    assert [line for line in said if line.isdigit()] == [*ends.values()]
    early, memory, crashed = [line for line in said if not line.isdigit()]
    assert "has ended before its last step" in early
    assert "the machine or its job ran out of memory" in memory
    assert "has crashed (Segmentation fault)" in crashed


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["launcher", "command"])
def test_what_is_killed_takes_its_ranks_along(tmp_path, killed):
    with two_ranks(tmp_path) as (started, _):
        ranks = launching._ranks_below(psutil.Process(started.pid).children()[0].pid)
        assert len(ranks) == 2
        launcher = ranks[0].parent()
        (launcher if killed == "launcher" else started).kill()
        assert started.wait(timeout=300) == (137 if killed == "launcher" else -signal.SIGKILL)
        assert psutil.wait_procs([launcher, *ranks], timeout=300)[1] == []


def test_a_rank_that_ends_after_its_launcher_ends_quietly(tmp_path):
    ending = "from trainer.machine import exits; exits.leave(0)"
    done = launch(sys.executable, "-c", ending, **{exits.END: str(tmp_path / "gone" / "end")})
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
