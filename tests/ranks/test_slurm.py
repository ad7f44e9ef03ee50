"""Who this process is, from what srun leaves in the environment."""

import os
import sys

import pytest

from tests.conftest import ROOT, program, ran, refuses
from trainer.errors import ClusterError
from trainer.ranks import slurm

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def task(monkeypatch):
    """The environment of one task of a step."""
    for name in [name for name in os.environ if name.startswith("SLURM") or name in NAMES]:
        monkeypatch.delenv(name)

    def make(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield make
    for name in NAMES:
        os.environ.pop(name, None)


STEP = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "node[1-2]"}
STEP |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}


OF_MPI = {"RANK": "5", "LOCAL_RANK": "1", "SIZE": "8", "LOCAL_SIZE": "4"}
PORT_OF_MPI = str(slurm.PORTS[os.getppid() % len(slurm.PORTS)])
OF_DEEPSPEED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}
WHO = {  # -> what is in the environment, and what becomes of it
    "a task of srun": (STEP, {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "10539"}),
    "a rank of deepspeed": (OF_DEEPSPEED, {"LOCAL_WORLD_SIZE": "4"}),
    "a rank of torchrun": (OF_DEEPSPEED | {"LOCAL_WORLD_SIZE": "2"}, {"LOCAL_WORLD_SIZE": "2"}),
    "a rank of mpirun": (
        {f"OMPI_COMM_WORLD_{name}": value for name, value in OF_MPI.items()},
        {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_PORT": PORT_OF_MPI},
    ),
    "a launcher in a task": (STEP | {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}),
    "a lone task": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, {"RANK": None}),
    "the shell of a job": ({name: STEP[name] for name in STEP if name != "SLURM_STEP_ID"}, {"RANK": None}),
}
NODES = [("4(x2),3", "0", "4"), ("4(x2),3", "1", "4"), ("4(x2),3", "2", "3"), ("1,3", "1", "3"), ("2", "0", "2")]
WHO |= {
    f"a task of node {node} of {each}": (
        STEP | {"SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": each},
        {"LOCAL_WORLD_SIZE": here},
    )
    for each, node, here in [*NODES, ("1(x10)", "9", "1")]
}


@pytest.mark.parametrize("who", WHO)
def test_a_process_takes_its_rank_from_what_has_started_it(task, who):
    given, expected = WHO[who]
    task(**given, MASTER_ADDR="node1")
    slurm.adopt_ranks()
    assert {name: os.environ.get(name) for name in expected} == expected


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_a_variable_that_is_no_number_is_named(task, name):
    task(**{name: "abc"})
    with refuses(name, ClusterError):
        slurm.adopt_ranks()


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_RANK"),
        ({name: STEP[name] for name in STEP if name != "SLURM_LOCALID"}, "SLURM_LOCALID"),
    ],
)
def test_a_variable_that_the_launcher_has_left_out_is_named(task, given, missing):
    task(**given)
    with refuses(missing, ClusterError, names="torchrun"):
        slurm.adopt_ranks()


def test_without_scontrol_it_says_what_to_export(task, monkeypatch):
    task(**STEP)
    monkeypatch.setenv("PATH", "")
    with refuses("SLURM_STEP_NODELIST", ClusterError, names="MASTER_ADDR"):
        slurm.adopt_ranks()


def test_jobs_and_their_steps_have_ports_of_their_own(task):
    ports = []
    for job, step in (("1", "0"), ("1", "1"), ("2", "0"), ("4000000", "0")):
        task(SLURM_JOB_ID=job, SLURM_STEP_ID=step)
        ports.append(slurm.port())
    assert len(set(ports)) == 4
    assert all(10_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(("text", "seconds"), [
    ("1:30", 90), ("2:00:05", 7205), ("1-00:00:01", 86_401), ("UNLIMITED", None), ("INVALID", None), ("", None),
])  # fmt: skip
def test_the_time_that_is_left_is_read(text, seconds):
    assert slurm.seconds_of(text) == seconds


def test_a_controller_that_does_not_answer_is_no_reason_to_end_a_run(task, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path / "squeue", "#!/bin/sh\necho 2:00:05\n")
    assert slurm.seconds_left() is None, "of the jobs of others"
    task(SLURM_JOB_ID="1")
    assert slurm.seconds_left() == 7205
    program(tmp_path / "squeue", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.2)
    assert slurm.seconds_left() is None


def test_a_task_of_an_array_is_called_by_both_numbers(task):
    assert slurm.job_number() == slurm.describe() == ""
    task(SLURM_JOB_ID="12", SLURM_JOB_NODELIST="node3")
    assert slurm.describe() == "Slurm job 12 on node3, restart 0 (SLURM_RESTART_COUNT)"
    task(SLURM_ARRAY_JOB_ID="10", SLURM_ARRAY_TASK_ID="2", SLURM_RESTART_COUNT="1")
    assert slurm.describe() == "Slurm job 10_2 on node3, restart 1 (SLURM_RESTART_COUNT)"


def test_a_rank_that_ends_before_it_meets_the_others_reports_it_to_the_job(tmp_path):
    """The first rank of a machine reads the data. The others would wait until srun ends them with signal 9, and the job
    would start again."""
    (tmp_path / "bad.jsonl").write_text("no record")
    settings = ["task.name=records", f"task.path={tmp_path}/bad.jsonl"]
    own = {"OCTET_FAILED": str(tmp_path / "run/failed"), "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    answer = ran(sys.executable, ROOT / "train.py", "--preset", "nano", *settings, cwd=tmp_path, env=os.environ | own)
    assert answer.returncode == 2
    assert answer.stderr == (tmp_path / "run/failed").read_text().replace("rank 0 ended with", "octet:")
