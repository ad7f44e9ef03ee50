"""octet slurm without Slurm: the script, the configuration, and mistakes. tests/slurm submits them."""

import os
import shlex

import pytest
import yaml

from tests.commands.conftest import write
from tests.conftest import ROOT, octet, program, refuses, said_by
from trainer.commands import slurm
from trainer.config.resolve import resolve
from trainer.errors import ClusterError
from trainer.model.shapes import shape_of
from trainer.plan.cards import CARDS
from trainer.plan.hours import H100, Duration
from trainer.plan.planner import Planner


@pytest.fixture
def site(tmp_path, monkeypatch):
    limits = "SBATCH_TIMELIMIT=01:00:00 SBATCH_REQ_SWITCH=1 SBATCH_NO_KILL=1 SBATCH_CPU_FREQ_REQ=high"
    names = f'export SBATCH_PARTITION="h100,a100" SBATCH_ACCOUNT= SBATCH_WAIT=1 {limits} SBATCH_IGNORE_PBS=1\n'
    (tmp_path / "site.env").write_text(names)
    monkeypatch.setenv("OCTET_SITE", str(tmp_path / "site.env"))
    return tmp_path / "site.env"


def made(folder, **options) -> tuple[list[str], str]:
    """The #SBATCH lines, and the rest."""
    config = resolve("nano", None, ["run.steps=5"])
    text = slurm.write(config, folder, slurm.JobRequest(**options)).read_text()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    return lines, text[text.rindex(lines[-1]) + len(lines[-1]) :]


def test_the_script_has_what_was_asked_and_what_the_site_says(site, tmp_path):
    lines, body = made(tmp_path / "run", nodes=2, gpus=4)
    own = {"nodes=2", "gpus-per-node=4", "partition=h100,a100", "time=01:00:00", "signal=USR1@120", "requeue"}
    own |= {"switches=1", "no-kill", "cpu-freq=high", "ignore-pbs"}
    assert {f"#SBATCH --{line}" for line in own} <= {*lines}
    assert not [line for line in lines if "account" in line or "wait" in line]
    assert f"export OCTET_ROOT={ROOT} OCTET_SITE={site}" in body
    assert f"set -- --preset {tmp_path}/run/job.yaml run.dir={tmp_path}/run" in body
    assert (ROOT / "slurm/multi_node.sbatch").read_text().splitlines()[-1] in body
    stored = yaml.safe_load((tmp_path / "run/job.yaml").read_text())
    assert (stored["run"]["steps"], stored["run"]["dir"]) == (5, str(tmp_path / "run"))
    for mark in (tmp_path / "run/finished", tmp_path / "run/001/finished"):
        mark.parent.mkdir(exist_ok=True)
        mark.touch()
    lines, body = made(tmp_path / "run", nodes=4, gpus=2, least=1, time="10:00", chain=5)
    assert not list((tmp_path / "run").rglob("finished"))  # a run that is made longer
    assert {"#SBATCH --nodes=1-4", "#SBATCH --time=10:00"} < set(lines)  # the command line goes before the site
    assert (ROOT / "slurm/multi_node.sbatch").read_text().splitlines()[-1] in body  # srun starts a rank for each GPU


def test_a_run_that_starts_servers_gets_the_script_that_does_so_in_its_place(site, tmp_path, capsys):
    asked = ["slurm", "--preset", "nano", "--nodes=3-4", "--gpus=4", "--dry-run", f"run.dir={tmp_path}/run"]
    for option, count in (("--vllm=2", 2), ("rollout.vllm.start=true", 1)):
        assert octet(*asked, option) == 0
        said = capsys.readouterr().out
        assert f"export OCTET_TRAIN=train_beside_servers OCTET_VLLM_NODES={count} OCTET_VLLM_GPUS={count}\n" in said
        assert '\ntrain_beside_servers "$(folder_of "$@")" "$@"\n' in said
    _, body = made(tmp_path / "run", nodes=1, gpus=4, vllm=1, grid=ROOT / "slurm/grid.example")
    assert '"${OCTET_TRAIN:-train_in}"' in body
    assert [slurm.JobRequest(4, 8, vllm=1).ranks(nodes) for nodes in (1, 4)] == [7, 24]


def test_a_folder_with_a_space_is_one_word_and_the_script_can_be_read_by_whom_the_umask_lets(site, tmp_path):
    before = os.umask(0o077)
    try:
        lines, _ = made(tmp_path / "my 100%", nodes=1, gpus=1)
    finally:
        os.umask(before)
    assert oct((tmp_path / "my 100%/job.sbatch").stat().st_mode & 0o777) == "0o700"
    assert f"#SBATCH --output='{tmp_path}/my 100%%/slurm-%j.out'" in lines
    assert "#SBATCH --job-name='my 100%'" in lines


def test_a_sweep_has_a_task_for_each_line_of_settings(site, tmp_path):
    grid = tmp_path / "my grid"
    grid.write_text("\ufeff# learning rates\nalgorithm.lr=1e-3\n\nalgorithm.lr=2e-3\n")  # as Notepad writes it
    lines, body = made(tmp_path / "my run", nodes=1, gpus=1, grid=grid)
    assert "#SBATCH --array=1-2" in lines
    read = tmp_path / "my run/grid"
    assert f"set -- {shlex.quote(str(read))} --preset" in body
    assert read.read_text() == grid.read_text()  # so that the original can be changed while tasks wait


def test_the_example_of_a_site_is_read_and_chooses_nothing_by_accident(monkeypatch):
    """It is sourced into the shell of a person, who may have a cache already and wants to fetch models later."""
    example = ROOT / "slurm/site.env.example"
    monkeypatch.setenv("HF_HOME", "/mine")
    for name in ("HF_HUB_OFFLINE", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    site = ("SBATCH_", "OCTET_", "HF_", "NCCL_", "GLOO_")
    found = slurm.read_site(example)
    added = {key: value for key, value in found.items() if key.startswith(site) and os.environ.get(key) != value}
    assert added == {"SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "04:00:00"}
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert slurm.read_site(example)["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(("content", "told"), [
    ("export SBATCH_PARTITION='h100", "bash"), ("exit 3", "status 3"), ("exit 0", "status 0"),
    ("sleep 60", "0.2 seconds"),
])  # fmt: skip
def test_a_broken_site_is_a_clear_error(site, monkeypatch, content, told):
    site.write_text(f"{content}\n")
    if "sleep" in content:
        monkeypatch.setattr(slurm, "SITE_S", 0.2)
    with refuses(site, names=told):
        slurm.read_site(site)
    monkeypatch.undo()  # on a busy machine it takes longer
    for last in (b"[ -d /nowhere ] && export HF_HOME=/nowhere", b"false", b"export B=\xff"):  # which may fail
        site.write_bytes(b"export SBATCH_PARTITION=h100\n" + last)
        assert slurm.read_site(site)["SBATCH_PARTITION"] == "h100"


def test_what_the_site_asks_for_is_asked_for(site, tmp_path, monkeypatch):
    """Variables that another site has left in the shell are ignored."""
    monkeypatch.setenv("SBATCH_CLUSTERS", "elsewhere")
    site.write_text("export SBATCH_GRES=nvme:1 SBATCH_CPUS_PER_GPU=2 SBATCH_MEM_PER_NODE=0 SBATCH_NO_REQUEUE=1\n")
    lines, _ = made(tmp_path / "run", nodes=1, gpus=1)
    options = ("gres=nvme:1", "cpus-per-gpu=2", "mem=0", "no-requeue")
    assert {f"#SBATCH --{option}" for option in options} <= {*lines}
    assert "clusters" not in "".join(lines)


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Puts a program of that name on the PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}/bin", prepend=":")
    return lambda script: program(tmp_path / "bin/sbatch", f"#!/bin/sh\n{script}\n")


def test_a_chain_that_is_refused_half_way_says_what_is_queued(site, sbatch, tmp_path):
    """The sbatch of some clusters greets its user before it prints the job."""
    count = f"echo x >> {tmp_path}/asked; n=$(wc -l < {tmp_path}/asked)"
    sbatch(f"{count}\necho Welcome; echo\n[ $n -lt 3 ] && echo $n || {{ echo full >&2; exit 1; }}")
    with refuses(tmp_path / "run/job.sbatch", ClusterError, names="scancel 1 2"):
        submit(tmp_path, chain=3)


def submit(folder, **options):
    config = resolve("nano", None, [f"run.dir={folder}/run"])
    slurm.slurm(config, "nano", slurm.JobRequest(nodes=1, gpus=1, **options), dry_run=False)


def test_a_job_of_a_run_that_has_ended_is_submitted(site, sbatch, tmp_path):
    """It has nothing to do, and says so. What a job is refused for is in tests/data/refusals.yaml."""
    config = resolve("nano", None, [f"run.dir={tmp_path}/run"])
    files = {"config.yaml": config.to_yaml(), "verdict.json": "{}", "adapter/adapter_config.json": "{}"}
    write(tmp_path / "run", files)
    sbatch(f"touch {tmp_path}/asked; echo 1")
    submit(tmp_path)
    assert (tmp_path / "asked").exists()


def test_a_slurm_that_does_not_answer_is_a_clear_error(site, sbatch, tmp_path, monkeypatch):
    sbatch("exec sleep 60")
    monkeypatch.setattr(slurm, "TIMEOUT_S", 0.2)
    with refuses("sbatch", ClusterError, names="squeue --me"):
        submit(tmp_path)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty folder, on a machine without sbatch and without a site."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("OCTET_SITE", str(tmp_path / "none"))


@pytest.mark.usefixtures("alone")
def test_a_dry_run_prints_the_script_and_submits_nothing(tmp_path, capsys):
    status, said, _ = said_by(capsys, "slurm", "--nodes", 2, "--gpus", 4, "--dry-run")
    assert (status, list(tmp_path.iterdir())) == (0, [])
    assert "#SBATCH --nodes=2" in said
    assert "# nothing is written or submitted; " in said
    assert said_by(capsys, "slurm", "--dry-run", "model.name=/only/on/the/nodes")[0] == 0
    for options, named in (((), "sbatch: "), (("--partition", "gpu"), "SBATCH_PARTITION=NAME")):
        status, _, told = said_by(capsys, "slurm", *options)
        assert (status, named in told) == (2, True)


@pytest.mark.usefixtures("alone")
def test_the_example_grid_is_right_for_the_preset_it_is_shown_with(capsys):
    grid = ROOT / "slurm/grid.example"
    status, said, told = said_by(capsys, "slurm", "--preset", "nano", "--sweep", grid, "--dry-run")
    assert (status, told, "#SBATCH --array=1-4" in said) == (0, "", True)
    shown = [(ROOT / "README.md").read_text(), (ROOT / "docs/slurm.md").read_text()]
    assert all("--preset nano --sweep slurm/grid.example" in page for page in shown)


def test_the_time_of_a_job_is_half_as_much_again_in_quarters_of_an_hour(site, capsys):
    def limit(*arguments: str) -> str:
        asked = ["slurm", "--preset", "80gb", "--time", "auto", "--card", "H100", "--dry-run", *arguments]
        lines = said_by(capsys, *asked)[1].splitlines()
        return next(line for line in lines if line.startswith("#SBATCH --time="))[15:]

    assert limit("run.steps=1") == "00:15:00"
    config = resolve("80gb", None, ["run.steps=1000"])
    planner = Planner(shape_of(config.model.name), config, 1, 0)
    seconds = 1.5 * Duration(planner, CARDS["H100"].speed, config.rollout.max_new_tokens, ratio=H100).run(1000)
    hours, minutes, _ = map(int, limit("run.steps=1000").split(":"))
    assert 0 <= 3600 * hours + 60 * minutes - seconds < 900
    assert limit("run.steps=100", "--gpus", "4") < limit("run.steps=100")
    assert limit("run.steps=100", "--chain", "2") < limit("run.steps=100")
