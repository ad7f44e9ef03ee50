"""A real Slurm on this machine for the tests: munge, a controller and two nodes with two GPUs each, all made up.

Debian's packages, without systemd and without a file under /etc, /run or /var. Each slurmd lives in a UTS and mount
namespace of its own, so that its host is called node1 or node2 and these names have an address.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.conftest import ran, until
from trainer.machine.hardware import free_port

PACKAGES = ("munge", "slurmctld", "slurmd", "slurm-client")
NODES = ("node1", "node2")
GPUS, CPUS = 2, 8  # of a node; nothing holds them to it
CLIENT_S = 240  # no client of Slurm may take longer, on a busy machine either
NAMESPACE = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'

CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
# a job that is started again waits for its old credential to expire: 120 s, if this line does not say 5, the least
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PriorityType=priority/basic
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
KillWait=5
InactiveLimit=0
SlurmctldTimeout=10
SlurmdTimeout=10
GresTypes=gpu
{nodes}
PartitionName=gpu Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why Slurm cannot be started on this machine; empty if it can."""
    if os.geteuid() != 0:
        return "only root can make the namespaces of its nodes"
    if reason := _no_container_for_it():
        return reason
    if all(shutil.which(program, path=_path()) for program in ("munged", "slurmctld", "slurmd", "sbatch")):
        return ""
    if shutil.which("apt-get") is None:
        return "there is no Slurm, and no apt-get to install it with"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 300}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update"], install):
        try:
            subprocess.run(command, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, check=True, **quiet)
        except subprocess.SubprocessError as error:
            return f"it cannot be installed: {error}"
    return ""


def _no_container_for_it() -> str:
    """Root in a container may do neither."""
    try:
        subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, timeout=CLIENT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"namespaces for its nodes cannot be made: {error}"
    try:
        with tempfile.TemporaryDirectory(dir="/tmp") as folder:
            os.mknod(f"{folder}/gpu", 0o20666, os.makedev(1, 3))
            Path(folder, "gpu").write_text("as into /dev/null")
    except OSError as error:
        return f"devices that stand in for its GPUs cannot be made: {error}"
    return ""


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


@dataclass
class Lab:
    folder: Path  # a short path: sockets have at most 108 characters

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": _path()}

    def start(self) -> None:
        for name in ("state", "log", "dev", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True)
        self._write_files()
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid"}
        munge |= {"log-file": "log/munged.log", "seed-file": "munged.seed"}
        self._daemon("munged", *(f"--{option}={self.folder / file}" for option, file in munge.items()))
        self._daemon("slurmctld", "-c")
        for node in NODES:
            self.start_node(node)
        until(lambda: self.client("sinfo", "-hN", "-t", "idle", "-o", "%N").split() == list(NODES), 15, self.logs)

    def start_node(self, node: str) -> None:
        inside = ["unshare", "--uts", "--mount", "sh", "-c", NAMESPACE, "_", node, str(self.folder / "hosts")]
        self._daemon(*inside, "slurmd", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill everything in the node's namespace at once, as a power failure does."""
        home = _namespace((self.folder / f"slurmd.{node}.pid").read_text().strip())
        running = [one for one in self.processes() if _namespace(one.pid) == home]
        _kill(sorted(running, key=lambda one: not one.info["name"].startswith("slurm")))

    def stop(self) -> None:
        """Whatever state it is in: nothing of it may outlive the tests."""
        with suppress(AssertionError, subprocess.SubprocessError, OSError):  # nobody may answer
            if jobs := self.client("squeue", "-h", "-o", "%A").split():
                self.client("scancel", "-Q", *jobs)
                until(lambda: not self.client("squeue", "-h"), 15)
        until(self._is_dead)

    def _is_dead(self) -> bool:
        """Kill jobs before daemons, which would report their end."""
        running = sorted(self.processes(), key=lambda one: one.info["name"].startswith(("slurm", "munge")))
        _kill(running)
        return not running

    def client(self, *command: str, **variables: str) -> str:
        return self.ask(*command, **variables).stdout

    def ask(
        self, *command: str, folder: Path | None = None, check: bool = False, timeout: float = CLIENT_S, **own: str
    ) -> subprocess.CompletedProcess[str]:
        """One client of Slurm, which may not hang."""
        return ran(*command, env=self.environment | own, cwd=folder, check=check, timeout=timeout)

    def state(self, job: str) -> str:
        """RUNNING, COMPLETED ..., with the exit status of the script."""
        said = self.client("scontrol", "show", "job", "-o", job)
        facts = dict(word.split("=", 1) for word in said.split() if "=" in word)
        return f"{facts.get('JobState', 'GONE')} {facts.get('ExitCode', '')}".strip()

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Those of this lab that have these variables."""
        own = {"SLURM_CONF": str(self.folder / "slurm.conf")} | variables
        every = psutil.process_iter(["environ", "name"])
        return [one for one in every if own.items() <= (one.info["environ"] or {}).items()]

    def logs(self) -> str:
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in (self.folder / "log").iterdir())

    def _daemon(self, *command: str) -> None:
        """All of them go to the background by themselves, when they are ready."""
        subprocess.run(command, env=self.environment, check=True, timeout=CLIENT_S)

    def _write_files(self) -> None:
        self.folder.chmod(0o755)  # munge refuses a folder that others can write to
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        for number in range(GPUS):  # a GPU is a character device; this one is as /dev/null
            os.mknod(self.folder / f"dev/gpu{number}", 0o20666, os.makedev(1, 3))
        names = "".join(f"127.0.0.1 {node}\n" for node in NODES)
        (self.folder / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (self.folder / "gres.conf").write_text(
            f"AutoDetect=off\nNodeName=node[1-2] Name=gpu File={self.folder}/dev/gpu[0-{GPUS - 1}]\n"
        )
        port, *ports = (free_port() for _ in range(1 + len(NODES)))
        shape = f"CPUs={CPUS} Boards=1 SocketsPerBoard=1 CoresPerSocket={CPUS} ThreadsPerCore=1 RealMemory=64000"
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=127.0.0.1 Port={its} {shape} Gres=gpu:{GPUS}"
            for node, its in zip(NODES, ports, strict=True)
        )
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(host=host, port=port, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf.lstrip())


def _namespace(process: object) -> str:
    with suppress(OSError):
        return os.readlink(f"/proc/{process}/ns/uts")
    return ""


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
