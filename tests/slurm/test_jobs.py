"""The shipped job scripts in a real Slurm: to the end, interrupted, killed, out of time, cancelled."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, lines_of, program, ran, until
from tests.slurm.conftest import SMALL, Job
from tests.slurm.lab import NODES

pytestmark = pytest.mark.slurm

STEPS = 30
RUN = [*SMALL, f"run.steps={STEPS}"]
TWO_NODES = ("--nodes=2", "--gpus-per-node=1", "--cpus-per-gpu=1")
TWO_GPUS = ("--gpus-per-node=2", "--cpus-per-gpu=1")
SHORT = ("--time=1", "--signal=CONT@1")  # instead of USR1: it may come half a minute early
METRICS = "metrics.jsonl"
EXACT = ("loss", "reward/mean", "accuracy/strict", "grad_norm", "length", "entropy", "eval/accuracy")


def result(folder: Path) -> tuple[bytes, list[dict]]:
    """The adapter of a run, and what is the same to the last bit in its metrics."""
    metrics = [{name: line[name] for name in ("step", *EXACT) if name in line} for line in lines_of(folder / METRICS)]
    return (folder / "adapter/adapter_model.safetensors").read_bytes(), metrics


def steps_done(folder: Path) -> int:
    path = folder / METRICS
    return len(path.read_text().splitlines()) - 1 if path.is_file() else 0  # the first line is of the base model


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """Two nodes, a rank on each, to the end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    job = cluster.submit("multi_node.sbatch", *RUN, f"run.dir={folder}", options=TWO_NODES)
    assert job.wait() == "COMPLETED 0:0", job.output
    return folder, job


def test_two_nodes_come_to_the_end(undisturbed):
    folder, job = undisturbed
    assert "2 x cpu" in job.output
    assert "sets partition" not in job.output  # it is in that of the site
    assert re.search(r"octet: Slurm job \d+ on node\[1-2\], restart 0 \(SLURM_RESTART_COUNT\)", job.output)
    assert job.output.count("after step 30: ") == 1  # of two ranks one speaks
    assert steps_done(folder) == STEPS


def test_the_result_is_that_of_two_ranks_without_slurm(undisturbed, tmp_path):
    """Started by torchrun, which is one more way to start it."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    command = [*launch, str(ROOT / "train.py"), *RUN, f"run.dir={tmp_path / 'run'}"]
    ran(*command, env=clean | {"OMP_NUM_THREADS": "1"}, check=True, timeout=580)
    assert result(tmp_path / "run") == result(undisturbed[0])


def test_a_signal_saves_starts_again_and_changes_nothing(undisturbed, cluster, tmp_path):
    folder = tmp_path / "run"
    job = cluster.submit("multi_node.sbatch", *RUN, f"run.dir={folder}", options=TWO_NODES)
    job.until(lambda: steps_done(folder) >= 2)
    cluster.lab.client("scancel", "--signal=USR1", job.number)
    assert job.wait() == "COMPLETED 0:0", job.output
    stopped = re.search(r"stopped after step (\d+), which is saved: SIGUSR1 was received", job.output)
    assert stopped, job.output
    assert f"continuing after step {stopped[1]}" in job.output
    assert "restart 1 (SLURM_RESTART_COUNT)" in job.output
    assert result(folder) == result(undisturbed[0])


def test_a_node_that_dies_is_survived(undisturbed, cluster, tmp_path):
    folder = tmp_path / "run"
    job = cluster.submit("multi_node.sbatch", *RUN, f"run.dir={folder}", "run.save_every=2", options=TWO_NODES)
    job.until((folder / "checkpoints/latest").exists)
    cluster.lab.kill_node("node2")
    try:
        job.until(lambda: not job.state.startswith("RUNNING"))
    finally:  # the other tests need it
        cluster.lab.start_node("node2")
    assert job.wait() == "COMPLETED 0:0", job.output
    assert "restart 1 (SLURM_RESTART_COUNT)" in job.output
    assert re.search(r"continuing after step \d+", job.output)
    assert result(folder) == result(undisturbed[0])


def test_a_rank_that_is_killed_is_named_and_tried_again(cluster, tmp_path):
    """The system kills a rank when it runs out of memory. Two ranks on one node."""
    folder = tmp_path / "run"
    settings = [*SMALL, "run.steps=12", "run.save_every=2", f"run.dir={folder}"]
    job = cluster.submit("single_node.sbatch", *settings, options=TWO_GPUS)
    job.until((folder / "checkpoints/latest").exists)
    (second,) = cluster.lab.processes(SLURM_PROCID="1", SLURM_JOB_ID=job.number)
    second.kill()
    assert job.wait() == "COMPLETED 0:0", job.output
    assert re.search(r"rank 1 on node\d: it died, or did not answer", job.output)
    assert re.search(r"restart 1 .*\n(.*\n)*.*continuing after step \d+", job.output)
    assert steps_done(folder) == 12


def test_a_run_saves_before_its_time_is_up_and_the_chain_goes_on(cluster, tmp_path):
    """Then the second job is cancelled, and leaves nothing behind."""
    folder = tmp_path / "run"
    # no SIGUSR1: the run itself looks at the clock
    long = [*SMALL, "run.steps=2000", f"run.dir={folder}"]
    first = cluster.submit("single_node.sbatch", *long, options=SHORT, OCTET_CHAIN="1")
    second = cluster.submit(
        "single_node.sbatch", *long, options=(f"--dependency=afterany:{first.number}",), OCTET_CHAIN="1"
    )
    assert first.wait() == "FAILED 75:0", first.output
    stopped = re.search(r"stopped after step (\d+), which is saved: the time limit of the job is near", first.output)
    assert stopped, first.output
    second.until(lambda: steps_done(folder) > int(stopped[1]))
    assert f"continuing after step {stopped[1]}" in second.output
    second.cancel()
    assert second.wait().startswith("CANCELLED")
    until(lambda: not cluster.lab.processes(SLURM_JOB_ID=second.number))


def test_a_sweep_is_a_run_for_each_line(cluster, tmp_path):
    grid = tmp_path / "grid"
    grid.write_text("# two\nalgorithm.lr=1e-3\n\nalgorithm.lr=2e-3 'reward.weights={correct: 1.0, format: 0.1}'\n")
    settings = [*SMALL, "run.steps=2", f"run.dir={tmp_path}"]
    job = cluster.submit("sweep.sbatch", str(grid), *settings, options=("--array=1-2",))
    _complete(job, tasks=2)
    runs = [tmp_path / name for name in ("001", "002")]
    assert [steps_done(run) for run in runs] == [2, 2]
    assert "format: 0.1" in (runs[1] / "config.yaml").read_text()


def test_a_study_is_an_array_with_a_run_for_each_arm_and_seed(cluster, tmp_path):
    settings = "{" + ", ".join(setting.replace("=", ": ") for setting in SMALL[2:-1]) + "}"
    (tmp_path / "tiny.yaml").write_text(
        f"settings: {settings}\nseeds: 1\narms: {{grpo: {{run.steps: 1}}}}\ncontrols: [random, supervised]\n"
    )
    command = [sys.executable, "-m", "trainer.commands.main", "study", "tiny.yaml"]
    site = cluster.site() | {"PYTHONPATH": str(ROOT), "OCTET_PYTHON": sys.executable}

    def study(option: str) -> str:
        return cluster.lab.ask(*command, option, folder=tmp_path, check=True, **site).stdout

    said = study("--slurm")
    assert "repeat this command after its runs have ended" in said
    _complete(_submitted(cluster, said), tasks=2)
    grid, lines = tmp_path / "runs/tiny/grid-1", (tmp_path / "runs/tiny/grid-1").read_text()
    _complete(_submitted(cluster, study("--slurm")), tasks=1)
    assert grid.read_text() == lines  # tasks of the first array might have been waiting
    assert "supervised" in (grid.parent / "grid-2").read_text()
    said = study("--collect")
    assert ("random (control)" in said, "supervised (control)" in said) == (True, True)


def _submitted(cluster, said: str) -> Job:
    return Job(cluster, re.search(r"submitted job (\d+)", said)[1])


def _complete(job: Job, tasks: int) -> None:
    """Wait until each task of an array has completed."""
    for task in range(1, tasks + 1):
        one = Job(job.cluster, f"{job.number}_{task}")
        assert one.wait() == "COMPLETED 0:0", one.output


def test_an_evaluation_is_split_over_the_ranks_and_gathered(undisturbed, cluster):
    folder = undisturbed[0]
    job = cluster.submit("eval.sbatch", "--adapter", str(folder / "adapter"), "--json", options=TWO_GPUS)
    assert job.wait() == "COMPLETED 0:0", job.output
    said = json.loads(job.output[job.output.index("{") :])  # from one of the two ranks
    accuracies = [one["accuracy"] for one in said["evaluations"]]
    run = json.loads((folder / "eval.json").read_text())
    assert accuracies == [one["accuracy"] for one in run["evaluations"][:2]]


def test_vllm_samples_on_one_gpu_for_a_run_on_the_other(cluster, tmp_path):
    """A real vLLM on the CPU, in the environment that `bash tests/run.sh vllm` makes."""
    python = Path(os.environ.get("OCTET_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
    if not python.is_file():
        pytest.skip(f"there is no vLLM: {python} is not there")
    small = "OCTET_VLLM_ARGUMENTS='--enforce-eager --dtype float32'\nexport VLLM_CPU_KVCACHE_SPACE=1"
    quick = "VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1"
    site = tmp_path / "site.env"
    shared = (cluster.folder / "site.env").read_text()
    site.write_text(f"{shared}export OCTET_VLLM_PYTHON={python}\nexport {small}\nexport {quick}\n")
    folder, settings = tmp_path / "run", [*SMALL, "run.steps=2"]
    job = cluster.submit("vllm.sbatch", *settings, f"run.dir={folder}", options=TWO_GPUS, OCTET_SITE=str(site))
    assert job.wait() == "COMPLETED 0:0", job.output
    assert "octet: 1 vLLM servers on node1, ranks on node1" in job.output
    assert "vllm_server" in (folder / "config.yaml").read_text()
    assert "/v1/completions" in (folder / "vllm-0.log").read_text()
    until(lambda: not cluster.lab.processes(SLURM_JOB_ID=job.number), 15)


DOUBLE = """#!/bin/sh
while [ "$1" != --port ]; do shift; done
cd {root} && PYTHONPATH=. exec {python} -m tests.e2e.vllm_double "$2"
"""


def test_octet_slurm_starts_servers_for_each_run_of_a_sweep(cluster, tmp_path):
    """Their answers come from the double of vLLM, through the shipped scripts."""
    double = program(tmp_path / "vllm", DOUBLE.format(root=ROOT, python=sys.executable))
    site, grid = tmp_path / "site.env", tmp_path / "grid"
    site.write_text(f"{(cluster.folder / 'site.env').read_text()}export OCTET_VLLM_PYTHON={double}\n")
    grid.write_text("algorithm.lr=1e-3\n")
    command = [sys.executable, "-m", "trainer.commands.main", "slurm", *SMALL, "run.steps=1", "--gpus=2", "--vllm=1"]
    command += [f"--sweep={grid}", f"run.dir={tmp_path}/runs"]
    around = {"PYTHONPATH": str(ROOT), "OCTET_SITE": str(site)}
    said = cluster.lab.ask(*command, folder=cluster.folder, check=True, **around).stdout
    job = _submitted(cluster, said)
    _complete(job, tasks=1)
    run = tmp_path / "runs/001"
    assert steps_done(run) == 1
    assert "- http://node" in (run / "config.yaml").read_text()
    until(lambda: not cluster.lab.processes(SLURM_JOB_ID=job.number), 15)


def adopted(cluster, *step: str, names: list[str]) -> list[list[str]]:
    """The values of these variables in each task of a step."""
    code = "import os; from trainer.ranks import slurm; slurm.adopt_ranks(); "
    code += f"print(*(os.environ[name] for name in {names}))"
    answer = cluster.lab.ask("srun", "--nodes=2", *step, sys.executable, "-c", code, folder=ROOT, check=True)
    return sorted(line.split() for line in answer.stdout.splitlines())


def test_each_task_may_see_one_card_of_its_own(cluster):
    """Many clusters give cards out in this way. CUDA then sees one card, the first."""
    names = ["SLURMD_NODENAME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES"]
    step = ["--ntasks-per-node=2", "--gpus-per-task=1", "--gpu-bind=single:1", "--cpus-per-gpu=1"]
    seen = adopted(cluster, *step, names=names)
    ranks = [[NODES[0], "0", "4", "0", "2"], [NODES[0], "1", "4", "1", "2"]]
    ranks += [[NODES[1], "2", "4", "0", "2"], [NODES[1], "3", "4", "1", "2"]]
    assert [task[:5] for task in seen] == ranks
    for node in NODES:
        assert sorted(task[5] for task in seen if task[0] == node) == ["0", "1"]  # one each


def test_a_step_of_unequal_nodes_knows_its_ranks(cluster):
    """Three tasks on two nodes."""
    step = ["--ntasks=3", "--cpus-per-task=1"]
    assert adopted(cluster, *step, names=["LOCAL_WORLD_SIZE"]) == [["1"], ["2"], ["2"]]


def test_a_launcher_inside_of_a_task_passes_the_signal_on(cluster, tmp_path):
    """One task with two ranks. Slurm sends the signal to all processes of the step, and the ranks alone act on it."""
    folder = tmp_path / "run"
    script = tmp_path / "job.sh"
    settings = [*SMALL, "run.steps=2000", f"run.dir={folder}"]
    command = shlex.join([sys.executable, "-m", "tests.e2e.two_ranks", *settings])
    script.write_text(f"#!/bin/sh\ncd {ROOT}\nexec srun --ntasks=1 {command}\n")
    output = f"--output={cluster.folder}/inside-%j.out"
    answer = cluster.lab.ask("sbatch", "--parsable", *TWO_GPUS, output, str(script), folder=tmp_path)
    job = Job(cluster, answer.stdout.strip())
    job.until(lambda: steps_done(folder) >= 1)
    cluster.lab.client("scancel", "--signal=USR1", job.number)
    assert job.wait() == "FAILED 75:0", job.output
    assert "on 2 x cpu" in job.output
    assert "which is saved: SIGUSR1 was received" in job.output
    assert (folder / "checkpoints/latest").exists()


def test_a_node_that_does_not_answer_is_named(cluster, tmp_path):
    """The second task never starts to train."""
    train = f"{sys.executable} {ROOT}/train.py {' '.join(RUN)} engine.connect_s=2 run.dir={tmp_path}/run"
    silent = f"#!/bin/sh\n[ $SLURM_PROCID = 0 ] && exec {train}\nsleep 600\n"
    script = program(tmp_path / "silent.sh", silent)
    answer = cluster.lab.ask("srun", "--nodes=2", "--ntasks-per-node=1", "--wait=1", str(script), timeout=580)
    assert "rank 1 of 2 did not answer within 2 s (engine.connect_s). No rank on node2 has answered." in answer.stderr
    assert answer.returncode != 0
