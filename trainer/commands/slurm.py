"""`octet slurm`: write a job script and the resolved configuration into a run folder, and submit the job.

The script is one of `slurm/*.sbatch` with the options of this job: the command line takes precedence over
`slurm/site.env`, and that over the defaults of the script.
"""

import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from math import ceil
from pathlib import Path

from trainer.commands.shared_options import add_settings_of_a_run, positive
from trainer.config import ds_config
from trainer.config.resolve import resolve
from trainer.config.settings import RUNS, Config, Vllm
from trainer.errors import ClusterError, ConfigError, ModelError
from trainer.machine import disk
from trainer.machine.installed_files import IS_INSTALLED, ROOT
from trainer.machine.safe_text import print, visible
from trainer.model.shapes import known_shape, shape_of
from trainer.plan import hours, preflight
from trainer.plan.memory_check import no_layer_to_adapt
from trainer.plan.planner import Planner
from trainer.run_folder import changed_settings

SCRIPTS = ROOT / "slurm"
TIMEOUT_S = 120.0  # of sbatch
SAFE = 1.5  # factor between the longest estimate and the time limit of a job
SITE_S = 60.0  # of site.env
# Options of sbatch whose SBATCH_ variables have another name, and options without a value.
OPTIONS = {"timelimit": "time", "mem-per-node": "mem", "req-switch": "switches", "cpu-freq-req": "cpu-freq"}
SERVERS = "http://servers-of-the-job"  # stands in job.yaml for the vLLM servers that the script of the job starts
FLAGS = {"ignore-pbs", "no-kill", "no-requeue", "overcommit", "requeue", "spread-job", "use-min-nodes"}


@dataclass(frozen=True, slots=True)
class JobRequest:
    nodes: int  # at most
    gpus: int  # per node
    time: str | None = None
    grid: Path | None = None  # file of a sweep, with the settings of one run per line
    chain: int = 1  # number of jobs that continue the run one after the other
    least: int | None = None  # fewest nodes with which the job may start
    tasks: int | None = None  # number of lines in the grid, if that file is not written yet
    vllm: int = 0  # nodes, or GPUs of a single node, that have vLLM servers
    settings: Sequence[str] = ()  # of the command line

    def ranks(self, nodes: int) -> int:
        return (nodes - self.vllm) * self.gpus if nodes > 1 else self.gpus - self.vllm

    @property
    def range(self) -> str:
        """Return the number of nodes in the syntax of sbatch."""
        return str(self.nodes) if self.least is None else f"{self.least}-{self.nodes}"

    @property
    def script(self) -> str:
        if self.grid:
            return "sweep.sbatch"
        if self.vllm:
            return "vllm.sbatch"
        return "multi_node.sbatch" if self.nodes > 1 else "single_node.sbatch"


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet slurm --preset cluster --nodes 2 --gpus 4"
    add_settings_of_a_run(parser, "cluster")
    parser.add_argument("--nodes", default="1", help="number of nodes (default 1), or a range such as 1-4")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs of each node (default 1), with one rank each")
    parser.add_argument("--time", help="time limit for sbatch, or auto; by default that of slurm/site.env")
    hours.add_arguments(parser)
    parser.add_argument("--sweep", type=Path, metavar="GRID", help="submit a run for each line of this file")
    parser.add_argument("--chain", type=positive, default=1, metavar="N", help="N jobs; each continues the run")
    parser.add_argument(
        "--vllm", type=positive, metavar="N", help="vLLM servers on N nodes, or on N GPUs of a single node"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print the script")


def run(options: Namespace) -> None:
    if options.time != "auto" and (options.card is not None or options.like):
        raise ConfigError("--card and --like", "they are for --time auto", "Write that as well, or leave them out")
    config = _resolved(options)
    nodes = re.fullmatch(r"(?:([1-9]\d{0,4})-)?([1-9]\d{0,4})", options.nodes)
    if not nodes or int(nodes[1] or 1) > int(nodes[2]):
        reason = "it is neither a number of machines nor a range of them"
        raise ConfigError(f"--nodes {visible(options.nodes)[:100]}", reason, "Write 4, or 1-4")
    least = int(nodes[1]) if nodes[1] else None
    vllm = (options.vllm or 1) if SERVERS in config.rollout.vllm.urls else 0
    request = JobRequest(
        int(nodes[2]), options.gpus, options.time, options.sweep, options.chain, least, None, vllm, options.overrides
    )
    if options.time == "auto":
        request = replace(request, time=_limit(config, request, options))
    for number, line in enumerate(_lines(options.sweep) if options.sweep else [], start=1):
        try:
            of_line = _resolved(options, _words(line))
            if (SERVERS in of_line.rollout.vllm.urls) != bool(vllm):
                reason = "the jobs of an array are alike, with or without servers"
                raise ConfigError("rollout.vllm.start", reason, "Write --vllm N for all runs, or leave it out")
            check(of_line, request)
        except ValueError as error:  # of the settings, or of a quote that is not closed
            raise ConfigError(f"--sweep {options.sweep}, run {number} ({line})", str(error)) from None
    slurm(config, options.preset, request, options.dry_run)


def _resolved(options: Namespace, line: Sequence[str] = ()) -> Config:
    servers = ["rollout.vllm.start=true"] if options.vllm else []
    config = of_job(options.preset, options.recipe, [*servers, *options.overrides, *line])
    if servers and SERVERS not in config.rollout.vllm.urls:
        raise ConfigError("rollout.vllm.start=false", f"--vllm {options.vllm} starts servers", "Leave one of them out")
    return config


def of_job(preset: str, recipe: str | None, settings: Sequence[str]) -> Config:
    """Return the settings of a run. If it starts vLLM servers, the script of the job does that in its place."""
    config = resolve(preset, recipe, settings)
    vllm = config.rollout.vllm
    if not vllm.start:
        return config
    for name in ("python", "devices", "tensor_parallel", "memory", "arguments"):
        if getattr(vllm, name) != Vllm.model_fields[name].default:
            reason = "a job has one server for each GPU that is not trained on"
            remedy = "Leave it out. See --vllm, and OCTET_VLLM_PYTHON and OCTET_VLLM_ARGUMENTS in slurm/site.env"
            raise ConfigError(f"rollout.vllm.{name}", reason, remedy)
    in_job = ["rollout.engine=vllm_server", "rollout.vllm.start=false", f"rollout.vllm.urls={SERVERS}"]
    try:
        return resolve(preset, recipe, [*settings, *in_job])
    except ConfigError as error:
        reason = f"the job starts the servers, not the run, and {error.reason}"
        raise ConfigError("rollout.vllm.start=true", reason, "Leave it out, and --vllm") from None


def _limit(config: Config, request: JobRequest, options: Namespace) -> str:
    """Return `SAFE` times the longest estimate for a job that gets the fewest nodes that it may start with, divided by
    the jobs of a chain, in quarters of an hour."""
    if request.grid:
        raise ConfigError("--time auto", "the runs of a --sweep take different times", "Write --time HH:MM:SS")
    check(config, request)
    ranks = request.ranks(request.least or request.nodes)
    planner = Planner(shape_of(config.model.name, config.model.revision), config, ranks, 0)
    time = hours.estimate(options, planner, "")
    if time is None or time.hours is None:
        missing = "the speed of the cards" if time is None else "the number of steps"
        remedy = "--card H100 or --like RUN" if time is None else "run.steps=N"
        raise ConfigError("--time auto", f"{missing} is unknown", f"Write {remedy} as well, or --time HH:MM:SS")
    quarters = max(1, ceil(SAFE * time.hours[1] / request.chain * 4))
    return f"{quarters // 4:02d}:{quarters % 4 * 15:02d}:00"


def slurm(config: Config, preset: str, request: JobRequest, dry_run: bool) -> None:
    check(config, request)
    folder = config.run.dir or RUNS / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    if not request.grid:  # on a node this would be said after the job has waited in the queue
        changed_settings.refuse_other_settings(folder, config)
        changed_settings.refuse_to_lengthen(folder, config)
    if dry_run:
        print("\n".join(_script(folder.absolute(), request)), end="")
        print(f"\n# nothing is written or submitted; without --dry-run this is {folder}/job.sbatch")
        return
    preflight.must_be_writable(folder)
    jobs = _submit(write(config, folder.absolute(), request), request)
    print("\n".join(_next_commands(jobs, folder, request)))


def write(config: Config, folder: Path, request: JobRequest) -> Path:
    """Write the script and the configuration into the run folder, and return the path of the script."""
    text = "\n".join(_script(folder, request))
    folder.mkdir(parents=True, exist_ok=True)
    for mark in (*folder.glob("finished"), *folder.glob("*/finished")):  # left by a shorter run, it would end a chain
        mark.unlink()
    if request.grid and not request.tasks:
        disk.replace(folder / "grid", request.grid.read_bytes())  # the original may change while tasks wait
    disk.replace(folder / "job.yaml", config.changed({"run.dir": folder}).to_yaml().encode())
    script = folder / "job.sbatch"
    disk.replace(script, text.encode())
    script.chmod(script.stat().st_mode | (script.stat().st_mode & 0o444) >> 2)  # whoever may read it may run it
    return script


def _script(folder: Path, request: JobRequest) -> Iterator[str]:
    shipped = (SCRIPTS / request.script).read_text().splitlines()
    marked = [line.removeprefix("#SBATCH --") for line in shipped if line.startswith("#SBATCH")]
    options = dict(line.partition("=")[::2] for line in marked)
    arguments = ["--preset", str(folder / "job.yaml"), f"run.dir={folder}"]
    yield "#!/usr/bin/env bash"
    yield f"# Made by octet slurm from slurm/{request.script}. Submitted again, it continues the run."
    for key, value in (options | _options(folder, request)).items():
        yield f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")  # sbatch unquotes like a shell
    yield f"export OCTET_ROOT={shlex.quote(str(ROOT))} OCTET_SITE={shlex.quote(str(site_file()))}"
    if IS_INSTALLED:  # without a checkout a job cannot create its environment
        yield f"export OCTET_PYTHON={shlex.quote(sys.executable)}"
    if request.chain > 1:
        yield "export OCTET_CHAIN=1"
    if request.vllm:
        yield f"export OCTET_TRAIN=train_beside_servers OCTET_VLLM_NODES={request.vllm} OCTET_VLLM_GPUS={request.vllm}"
    if request.grid:
        # typed weights stay, also if a line names functions, beside which those of a file do not apply
        arguments[2:2] = [one for one in request.settings if one.startswith(("reward.weights", "rollout.dead_by="))]
        arguments.insert(0, str(request.grid.absolute() if request.tasks else folder / "grid"))
    yield f'set -- {shlex.join(arguments)} "$@"'
    body = next(index for index, line in enumerate(shipped) if line.startswith("set -"))
    yield from [*shipped[body:], ""]


def _options(folder: Path, request: JobRequest) -> dict[str, str]:
    site = {name: value for name, value in read_site(site_file()).items() if name.startswith("SBATCH_") and value}
    named = {name.removeprefix("SBATCH_").lower().replace("_", "-"): value for name, value in site.items()}
    named.pop("wait", None)  # with which sbatch would not return before the job ends
    options = {OPTIONS.get(name, name): "" if name in FLAGS else value for name, value in named.items()}
    options |= {"nodes": request.range, "gpus-per-node": str(request.gpus), "job-name": folder.name}
    options["chdir"] = str(Path.cwd())  # paths in the settings are relative to it
    pattern = "slurm-%A_%a.out" if request.grid else "slurm-%j.out"
    options["output"] = f"{str(folder).replace('%', '%%')}/{pattern}"
    if request.time:
        options["time"] = request.time
    if request.grid:
        options["array"] = f"1-{request.tasks or len(_lines(request.grid))}"
    for name, value in options.items():
        if not value.isprintable():  # text after a line break would be a command of the script
            where = {"chdir": "the working folder", "output": "run.dir", "job-name": "run.dir"}.get(name, f"--{name}")
            raise ConfigError(f"{where}={value!r}", "it contains a control character", "Write it without")
    if request.time and not re.fullmatch(r"(\d+-)?\d+(:\d+){,2}|unlimited|infinite", request.time.lower()):
        raise ConfigError(f"--time={request.time}", "sbatch does not know this form", "Write HH:MM:SS or DAYS-HH:MM:SS")
    return options


def site_file() -> Path:
    return Path(os.environ.get("OCTET_SITE", SCRIPTS / "site.env")).absolute()


def read_site(path: Path) -> dict[str, str]:
    """Return the environment that the file exports. It is a shell script, and its last command may fail."""
    if not path.is_file():
        return {}
    command = ["bash", "-c", 'bash -n "$1" && { source "$1" >/dev/null; env -0; }', "bash", str(path)]
    try:
        answer = subprocess.run(command, env=_without_options(), capture_output=True, timeout=SITE_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(path, f"it has not ended after {SITE_S:g} seconds", "It should only set variables") from None
    if answer.returncode or not answer.stdout:  # after `exit 0`
        why = visible(os.fsdecode(answer.stderr).strip())[:500] or f"it exits with status {answer.returncode}"
        raise ConfigError(path, f"bash cannot read it: {why}", "Correct that line")
    return dict(entry.partition("=")[::2] for entry in os.fsdecode(answer.stdout).split("\0") if entry)


def _without_options() -> dict[str, str]:
    """Return the environment without SBATCH_ variables: those of another site.env would override the script."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}


def _lines(grid: Path) -> list[str]:
    """Return the lines of a grid that are neither empty nor comments."""
    try:
        text = grid.read_text(encoding="utf-8-sig")
        if lines := [line for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]:
            return lines
        reason = "it has no line of settings"
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it cannot be read as UTF-8 text ({getattr(error, 'strerror', error)})"
    raise ConfigError(f"--sweep {grid}", reason, "Copy slurm/grid.example")


def _words(line: str) -> list[str]:
    """Split a line as xargs does in sweep.sbatch: a backslash inside quotes is an ordinary character."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escapedquotes = True, "", ""
    return list(lexer)


def check(config: Config, request: JobRequest) -> None:
    ds_config.check(config, has_gpu=True)
    if min(map(request.ranks, range(request.least or request.nodes, request.nodes + 1))) < 1:
        asked = f"--nodes {request.range} --gpus {request.gpus} --vllm {request.vllm}"
        raise ConfigError(asked, "no GPU is left to train on", "Request more, or fewer for the servers")
    if request.least is not None and ds_config.splits_weights(ds_config.zero_settings(config.engine)):
        splits = f"engine.ds_config={config.engine.ds_config} splits the weights over the ranks (ZeRO-3)"
        reason = f"{splits}, and such a run resumes with the same number of ranks only"
        raise ConfigError(f"--nodes {request.range}", reason, f"Write --nodes {request.nodes}")
    config.refuse_idle(ranks := request.ranks(request.nodes))
    with suppress(ModelError):  # of a folder that only the nodes see
        shape = known_shape(config.model.name, config.model.revision)
        if shape and (missing := no_layer_to_adapt(Planner(shape, config, ranks, vram=0))):
            raise ConfigError(missing)


def _submit(script: Path, request: JobRequest) -> list[str]:
    """Submit the jobs and return their ids. Each job of a chain starts when the one before has ended in any way."""
    jobs: list[str] = []
    for _ in range(request.chain):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        try:
            jobs.append(_sbatch(script, after))
        except ClusterError as error:
            if jobs:
                ids = " ".join(jobs)
                error.args = (f"{error}\nSubmitted before that, and queued: job {ids}. `scancel {ids}` removes it.",)
            raise
    return jobs


def _sbatch(script: Path, options: Sequence[str]) -> str:
    try:
        command, env = ["sbatch", "--parsable", *options, str(script)], _without_options()
        answer = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise ClusterError("sbatch", "it is not on this machine", "Log in to a cluster, or add --dry-run") from None
    except (OSError, subprocess.SubprocessError) as error:
        remedy = f"Check with `squeue --me` whether the job is queued; if not, run sbatch {shlex.quote(str(script))}"
        raise ClusterError("sbatch", f"it does not answer ({error})", remedy) from None
    if answer.returncode:
        remedy = f"Change the options of octet slurm, or {site_file()}"
        raise ClusterError(str(script), f"sbatch refuses it: {answer.stderr.strip()}", remedy)
    return answer.stdout.strip().rpartition("\n")[2].partition(";")[0]


def _next_commands(jobs: Sequence[str], folder: Path, request: JobRequest) -> Iterator[str]:
    ids = " ".join(jobs)
    output = f"{jobs[0]}_1" if request.grid else jobs[0]
    yield f"octet: submitted job {ids}: {request.range} x {request.gpus} GPUs, {request.script}"
    yield f"follow  tail -F {shlex.quote(f'{folder}/slurm-{output}.out')}"
    yield f"state   squeue --jobs={','.join(jobs)}"
    yield f"stop    scancel {ids}"
    yield f"resume  sbatch {shlex.quote(f'{folder}/job.sbatch')}"
    if request.grid and not request.tasks:  # the runs of a study have names of their own
        yield f"compare octet compare {shlex.quote(str(folder))}/0*"
