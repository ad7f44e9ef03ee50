"""`octet slurm`: a job script and the resolved configuration in a run folder, and the job submitted.

The script is one of `slurm/*.sbatch` with the values of this job in it: options from the command line, then from
`slurm/site.env`, then those that are shipped. It can be submitted again by hand, and goes on with the same run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainer.commands.options import add_overrides
from trainer.config import ds_config
from trainer.config.command_line import resolve
from trainer.config.settings import RUNS, Config
from trainer.errors import ClusterError, ConfigError
from trainer.machine.shipped import IS_INSTALLED, ROOT

SCRIPTS = ROOT / "slurm"
ASK_S = 120.0  # what a question to Slurm may take
# Variables of site.env and the options that they stand for: sbatch itself reads them from its environment only.
SITE = {"PARTITION": "partition", "ACCOUNT": "account", "QOS": "qos", "TIMELIMIT": "time", "RESERVATION": "reservation"}
SITE |= {"CONSTRAINT": "constraint", "GRES": "gres", "EXCLUSIVE": "exclusive", "WCKEY": "wckey", "SIGNAL": "signal"}
SITE |= {"MEM_PER_NODE": "mem", "MEM_PER_CPU": "mem-per-cpu", "MEM_PER_GPU": "mem-per-gpu"}
SITE |= {"CPUS_PER_GPU": "cpus-per-gpu", "NETWORK": "network", "HINT": "hint"}


@dataclass(frozen=True, slots=True)
class Order:
    """What the command line asks of the cluster."""

    nodes: int
    gpus: int  # of each node
    time: str | None = None
    grid: Path | None = None  # a sweep over its lines
    chain: int = 1  # jobs that go on one after the other

    @property
    def script(self) -> str:
        if self.grid:
            return "sweep.sbatch"
        return "multi_node.sbatch" if self.nodes > 1 else "single_node.sbatch"


def add_arguments(parser: ArgumentParser) -> None:
    parser.epilog = "example: octet slurm --preset cluster --nodes 2 --gpus 4"
    parser.add_argument("--preset", default="cluster", help="by default cluster")
    parser.add_argument("--recipe", help="an objective on top of the preset")
    parser.add_argument("--nodes", type=int, default=1, help="how many (default 1)")
    parser.add_argument("--gpus", type=int, default=1, help="of each node (default 1), with one rank each")
    parser.add_argument("--time", help="limit, as sbatch reads it; by default that of slurm/site.env")
    parser.add_argument("--sweep", type=Path, metavar="GRID", help="a run for each line of this file")
    parser.add_argument("--chain", type=int, default=1, metavar="N", help="N jobs, each resuming the one before")
    parser.add_argument("--dry-run", action="store_true", help="write script and configuration, and submit nothing")
    add_overrides(parser, "rollout.group_size=16")


def run(options: Namespace) -> None:
    config = resolve(options.preset, options.recipe, options.overrides)
    order = Order(options.nodes, options.gpus, options.time, options.sweep, options.chain)
    slurm(config, options.preset, order, options.dry_run)


def slurm(config: Config, preset: str, order: Order, dry_run: bool) -> None:
    _check(config, order)
    folder = config.run.dir or RUNS / f"{Path(preset).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    script = write(config, folder.absolute(), order)
    if dry_run:
        print(script.read_text(), end="")
        print(f"\n# written, not submitted: {script} and {folder}/job.yaml")
        return
    jobs = _submit(script, order)
    for line in _how_to_go_on(jobs, folder, order):
        print(line)


def write(config: Config, folder: Path, order: Order) -> Path:
    """The script and the configuration, in the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for mark in (*folder.glob("finished"), *folder.glob("*/finished")):  # of a shorter run: a chain would do nothing
        mark.unlink()
    settings = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    (folder / "job.yaml").write_text(settings.to_yaml())
    script = folder / "job.sbatch"
    script.write_text("\n".join(_script(folder, order)))
    script.chmod(0o755)
    return script


def _script(folder: Path, order: Order) -> Iterator[str]:
    shipped = (SCRIPTS / order.script).read_text().splitlines()
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in shipped if line.startswith("#SBATCH")
    )
    arguments = ["--preset", str(folder / "job.yaml"), f"run.dir={folder}"]
    yield "#!/usr/bin/env bash"
    yield f"# Made by octet slurm from slurm/{order.script}. Submitted again, it goes on in the same run folder."
    for key, value in (options | _options(folder, order)).items():
        yield f"#SBATCH --{key}" + (f"={shlex.quote(value)}" if value else "")  # sbatch reads quotes as a shell does
    yield f"export OCTET_ROOT={shlex.quote(str(ROOT))} OCTET_SITE={shlex.quote(str(site_file()))}"
    if IS_INSTALLED:  # there is no checkout in which a job could make an environment
        yield f"export OCTET_PYTHON={shlex.quote(sys.executable)}"
    if order.chain > 1:
        yield "export OCTET_CHAIN=1"
    yield f"set -- {shlex.join([*([str(order.grid.absolute())] if order.grid else []), *arguments])}"
    body = next(index for index, line in enumerate(shipped) if line.startswith("set -"))
    yield from [*shipped[body:], ""]


def _options(folder: Path, order: Order) -> dict[str, str]:
    site = read_site(site_file())
    _refuse_unknown(site)
    options = {option: site[f"SBATCH_{name}"] for name, option in SITE.items() if site.get(f"SBATCH_{name}")}
    options |= {"nodes": str(order.nodes), "gpus-per-node": str(order.gpus), "job-name": folder.name}
    options["chdir"] = str(Path.cwd())  # what paths in the settings are relative to
    options["output"] = str(folder / ("slurm-%A_%a.out" if order.grid else "slurm-%j.out"))
    if order.time:
        options["time"] = order.time
    if order.grid:
        options["array"] = f"1-{_lines(order.grid)}"
    return options


def _refuse_unknown(site: dict[str, str]) -> None:
    """What would otherwise be lost without a word."""
    for name, value in site.items():
        if name.startswith("SBATCH_") and name.removeprefix("SBATCH_") not in SITE and value:
            raise ConfigError(
                f"{site_file()}: {name}={value}: octet slurm does not know it. Of SBATCH_ it knows "
                f"{', '.join(SITE)}. Leave it out, or submit a script of slurm/ with sbatch, which reads it."
            )


def site_file() -> Path:
    return Path(os.environ.get("OCTET_SITE", SCRIPTS / "site.env")).absolute()


def read_site(path: Path) -> dict[str, str]:
    """What the file exports; it is shell, so a shell reads it. Its last line may be a test that does not hold."""
    if not path.is_file():
        return {}
    command = ["bash", "-c", 'bash -n "$1" && { source "$1" >/dev/null; env -0; }', "bash", str(path)]
    answer = subprocess.run(command, env=_without_choices(), capture_output=True, text=True, timeout=60, check=False)
    if answer.returncode:
        why = answer.stderr.strip() or f"it ends the shell, with status {answer.returncode}"
        raise ConfigError(f"{path}: bash cannot read it: {why}. Mend that line.")
    return dict(entry.partition("=")[::2] for entry in answer.stdout.split("\0") if entry)


def _without_choices() -> dict[str, str]:
    """The environment, without what another site.env may have left in this shell: it would go before the script."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}


def _lines(grid: Path) -> int:
    if not grid.is_file():
        raise ConfigError(
            f"--sweep {grid}: there is no such file. Copy slurm/grid.example: a line of settings for each run."
        )
    lines = [line for line in grid.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise ConfigError(f"--sweep {grid}: there is no line of settings in it. Copy slurm/grid.example.")
    return len(lines)


def _check(config: Config, order: Order) -> None:
    ds_config.check(config, has_gpu=True)
    for name, number in (("nodes", order.nodes), ("gpus", order.gpus), ("chain", order.chain)):
        if number < 1:
            raise ConfigError(f"--{name} {number}: it must be at least 1.")
    config.refuse_idle(order.nodes * order.gpus)


def _submit(script: Path, order: Order) -> list[str]:
    """The numbers of the jobs; each of a chain waits for the end of the one before, whatever it is."""
    jobs: list[str] = []
    for _ in range(order.chain):
        after = [f"--dependency=afterany:{jobs[-1]}"] if jobs else []
        try:
            jobs.append(_sbatch(script, after, order))
        except ClusterError as error:
            if not jobs:
                raise
            raise ClusterError(
                f"{error}\nSubmitted before that: job {' '.join(jobs)}. `scancel {' '.join(jobs)}` takes back what is "
                f"queued; without it, these {len(jobs)} of the chain run."
            ) from None
    return jobs


def _sbatch(script: Path, options: Sequence[str], order: Order) -> str:
    command = ["sbatch", "--parsable", *options, str(script)]
    try:
        answer = subprocess.run(
            command, env=_without_choices(), capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except FileNotFoundError:
        raise ClusterError(
            "sbatch is not here, so this is no machine of a Slurm cluster. Log in to one, or write --dry-run."
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(
            f"sbatch does not answer ({error}). Look with `squeue --me` whether the job was taken; "
            f"if not, sbatch {shlex.quote(str(script))}."
        ) from None
    if answer.returncode:
        raise ClusterError(_explain(answer.stderr, script.read_text(), order))
    return answer.stdout.strip().partition(";")[0]


def _explain(said: str, script: str, order: Order) -> str:
    """What sbatch did not like, with what there is instead."""
    lines = re.findall(r"^#SBATCH --([\w-]+)=(.*)$", script, flags=re.MULTILINE)
    chosen = {key: "".join(shlex.split(value)) for key, value in lines}
    partition = chosen.get("partition", "")
    if "invalid partition" in said:
        return (
            f"partition={partition}: Slurm knows none of that name. There are: {_sinfo('%R')}. "
            f"Write SBATCH_PARTITION=... into {site_file()}."
        )
    if "node configuration is not available" in said or "Invalid generic resource" in said:
        where = f" of partition {partition}" if partition else ""
        has = _sinfo("%D x %G", *([f"--partition={partition}"] if partition else []))
        return (
            f"--nodes {order.nodes} --gpus {order.gpus}: no nodes{where} have that; there are {has}. "
            f"Ask for less, or for another SBATCH_PARTITION in {site_file()}."
        )
    return f"sbatch refuses {chosen.get('job-name', 'the job')}: {said.strip()}"


def _sinfo(wanted: str, *options: str) -> str:
    command = ["sinfo", "--noheader", f"--format={wanted}", *options]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return f"what sinfo would say, which cannot be asked ({error})"
    return ", ".join(sorted(set(answer.stdout.split("\n")) - {""})) or "none that can be seen"


def _how_to_go_on(jobs: Sequence[str], folder: Path, order: Order) -> Iterator[str]:
    several = " ".join(jobs)
    output = f"{jobs[0]}_1" if order.grid else jobs[0]
    shape = f"{order.nodes} x {order.gpus} GPUs"
    yield f"octet: submitted job {several}: {shape}, {order.script}"
    yield f"follow  tail -F {shlex.quote(f'{folder}/slurm-{output}.out')}"
    yield f"state   squeue --jobs={','.join(jobs)}"
    yield f"stop    scancel {several}"
    yield f"resume  sbatch {shlex.quote(f'{folder}/job.sbatch')}"
    if order.grid:
        yield f"compare octet compare {shlex.quote(str(folder))}/0*"
