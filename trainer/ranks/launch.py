"""Start the ranks through DeepSpeed's launcher, or one without it; forward signals to them, and say how they ended."""

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import psutil

from trainer.machine import hardware
from trainer.machine.exits import EARLY, END, SILENT_ENDS, STOPPING, shell_status
from trainer.machine.installed_files import ROOT
from trainer.machine.safe_text import print
from trainer.ranks import slurm
from trainer.sandbox.confine import ended_with_parent

TRAIN = ROOT / "train.py"
RETRY_S = 1
AFTER_A_SIGNAL = (-signal.SIGTERM, 1, 130)  # statuses of what a signal has ended; 1: DeepSpeed's launcher, 130: a rank
LEAVE_S = 60.0  # grace period of ranks after SIGTERM; DeepSpeed's launcher gives them 30
LEFT_S = 5.0  # grace period of processes that outlive a train.py which has ended well


def alone(machine: hardware.Hardware) -> dict[str, str]:
    """Return the environment that DeepSpeed's launcher gives an only rank. Without the launcher, torch is imported
    once instead of three times."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if not machine.gpus:
        return {**ranks, "DS_ACCELERATOR": "cpu"}
    (card,) = machine.gpus
    name = card.uuid if card.uuid.startswith("MIG-") else str(card.index)
    return {**ranks, "CUDA_VISIBLE_DEVICES": name}


def command(machine: hardware.Hardware, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts DeepSpeed's launcher on several cards. It has a free port, so that two runs can
    share a machine. Its log is off, because its errors only repeat those of the ranks. The program `deepspeed` would
    start the launcher as a process of its own, which survives it, and the ranks would keep the cards when this command
    is killed."""
    cards = {"localhost": [card.index for card in machine.gpus]}
    world = base64.urlsafe_b64encode(json.dumps(cards).encode()).decode()
    quiet = ["--log_level=critical", f"--master_port={hardware.free_port()}"]
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={world}", *quiet]
    return [*launcher, "--no_local_rank", str(TRAIN), *arguments]


def run_to_its_end(launch: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the launcher and return its exit status. Print how a process has ended that could not print why."""
    with tempfile.TemporaryDirectory() as folder:
        end = Path(folder) / "end"
        status = run(launch, {**environment, END: str(end), slurm.FOLDER: folder})
        # programs that clean /tmp delete the folder after days
        is_early = not status and end.parent.is_dir() and not end.exists()
    if how := EARLY if is_early else SILENT_ENDS.get(status):
        again = "`--resume` continues from the last checkpoint."
        print(f"octet: a process of this run {how}. {again}", file=sys.stderr)
    return status or int(is_early)


def run(launch: Sequence[str], environment: Mapping[str, str] | None = None) -> int:
    """Run the launcher and return its exit status. The launcher gets its own session, so that this process forwards
    Ctrl-C and the launcher receives it once. SIGUSR1 makes the ranks save and stop (ranks/stopping.py). It would kill
    DeepSpeed's launcher, and Slurm sends it to every process of a step, so all processes started here block it, and
    each rank unblocks it. If there is no rank yet, the signal is sent again until there is one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    child = subprocess.Popen(launch, env=environment, start_new_session=True, preexec_fn=ended_with_parent)  # noqa: PLW1509

    received: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        received.append(number)
        os.killpg(child.pid, signal.SIGTERM)

    def reaches_ranks(number: int) -> bool:
        ranks = _ranks_below(child.pid)
        for rank in ranks:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                rank.send_signal(number)
        return bool(ranks)

    def signal_ranks(number: int, frame: FrameType | None) -> None:
        if not reaches_ranks(signal.SIGUSR1):
            signal.alarm(RETRY_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Forward the first Ctrl-C to the ranks, which finish their step. At the second, or without ranks, end them."""
        signal.signal(signal.SIGINT, end)
        if not reaches_ranks(number):
            end(number, frame)

    def pause(number: int, frame: FrameType | None) -> None:
        """Pause the rank with this process, until a shell continues it. Several ranks would miss each other."""
        signal.signal(number, signal.SIG_IGN)  # once is enough
        if is_alone := len(_ranks_below(child.pid)) == 1:
            reaches_ranks(signal.SIGSTOP)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # returns when this process continues
        signal.signal(number, pause)
        if is_alone:
            reaches_ranks(signal.SIGCONT)

    for number in STOPPING:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # which `nohup` ignores
            signal.signal(number, end)
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTSTP, pause)
    for number in (signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, signal_ranks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    status = child.wait()
    with suppress(ProcessLookupError):  # ranks survive a launcher that is killed
        os.killpg(child.pid, signal.SIGTERM)
        _wait_for_group(child.pid, LEFT_S if Path((environment or {}).get(END, "")).is_file() else LEAVE_S)
        os.killpg(child.pid, signal.SIGKILL)
    ended_by_signal = received and status in AFTER_A_SIGNAL
    return 128 + received[0] if ended_by_signal else shell_status(status)


def _wait_for_group(group: int, seconds: float) -> None:
    """Wait for the processes of a group, which may be saving a checkpoint. After a second, print that it waits."""
    for tenth in range(int(10 * seconds)):
        running = 0
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):  # it has just ended
                running += os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE
        if not running:
            return
        if tenth == 10:
            print(f"octet: waiting up to {seconds:g} s for processes that the run has started", file=sys.stderr)
        time.sleep(0.1)


def _ranks_below(launcher: int) -> list[psutil.Process]:
    """Return the launcher itself if it is the only rank, else its children that run train.py."""
    processes = list(psutil.process_iter(["ppid", "cmdline"]))
    for process in processes:
        if process.pid == launcher and (process.info["cmdline"] or ())[1:3] == ["-u", str(TRAIN)]:
            return [process]
    below = [process for process in processes if process.info["ppid"] == launcher]
    return [process for process in below if str(TRAIN) in (process.info["cmdline"] or ())]
