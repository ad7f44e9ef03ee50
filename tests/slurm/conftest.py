"""The lab, and how the tests submit the shipped scripts: unchanged, with a site.env of their own."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, until
from tests.slurm.lab import Lab, why_not

# A run of the embedded model that takes seconds; two ranks have two problems each.
SMALL = ["--preset", "nano", "rollout.problems=4", "rollout.group_size=4", "rollout.max_new_tokens=24"]
SMALL += ["eval.problems=8", "run.save_every=100", "run.merge=false"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Cluster:
    lab: Lab
    folder: Path  # where jobs are submitted, and what they print goes to

    def submit(self, script: str, *arguments: str, options: tuple[str, ...] = (), **variables: str) -> Job:
        command = ["sbatch", "--parsable", *options, str(ROOT / "slurm" / script), *arguments]
        answer = self.lab.ask(*command, folder=self.folder, check=True, **(self.site() | variables))
        return Job(self, answer.stdout.strip())

    def site(self) -> dict[str, str]:
        """Return what `source slurm/site.env` leaves in the environment of a user, and where the checkout is."""
        text = (self.folder / "site.env").read_text()
        found = dict(re.findall(r"^export (\w+)=(\S*)$", text, flags=re.MULTILINE))
        return found | {"OCTET_ROOT": str(ROOT), "OCTET_SITE": str(self.folder / "site.env")}


@dataclass
class Job:
    cluster: Cluster
    number: str

    @property
    def state(self) -> str:
        return self.cluster.lab.state(self.number)

    @property
    def output(self) -> str:
        files = sorted(self.cluster.folder.glob(f"*-{self.number}.out"))
        return "\n".join(file.read_text() for file in files)

    def wait(self, seconds: float = 400) -> str:
        """Its state when it has ended."""
        self.until(lambda: self.state.startswith(ENDED), seconds)
        return self.state

    def until(self, is_so: Callable[[], bool], seconds: float = 400) -> None:
        until(is_so, seconds, lambda: f"{self.state}\n{self.output}")

    def cancel(self) -> None:
        self.cluster.lab.client("scancel", self.number)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    if reason := why_not():
        pytest.skip(f"no Slurm here: {reason}")
    started = Lab(Path(tempfile.mkdtemp(prefix="octet-lab-", dir="/tmp")))
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(started.folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    folder = tmp_path_factory.mktemp("submit")
    lines = ["SBATCH_PARTITION=gpu", f"OCTET_PYTHON={sys.executable}", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]
    (folder / "site.env").write_text("".join(f"export {line}\n" for line in lines))
    return Cluster(lab, folder)
