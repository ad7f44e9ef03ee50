"""Start `deepspeed train.py` on the devices that are here; the arguments go on to train.py. Under `srun`, which has
started a process for each device already, this one becomes train.py.

The settings are read first, so a typo or a model that cannot be had is answered in a second, not after three imports
of torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from trainer.checks import memory, preflight
from trainer.checks.cards import training_cards
from trainer.config import ds_config
from trainer.config.command_line import Request, parse_command_line
from trainer.exits import answering_errors
from trainer.machine import hardware
from trainer.machine.shipped import ROOT
from trainer.ranks import slurm
from trainer.reward import make

TRAIN = ROOT / "train.py"
TELL_AGAIN_S = 1


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    machine = hardware.detect()
    if slurm.is_one_of_several() or (slurm.is_step() and len(machine.gpus) <= 1):
        os.execv(sys.executable, [sys.executable, str(TRAIN), *arguments])  # the same process: signals reach it
    request = parse_command_line(arguments)
    if request.dry_run:
        print(request.config.to_yaml(), end="")
        return
    if request.reason:
        print(f"octet: {request.reason}", file=sys.stderr if request.json else sys.stdout, flush=True)
    machine = training_cards(machine, request.config.rollout.vllm)
    request.config.refuse_idle(max(1, len(machine.gpus)))
    ds_config.check(request.config, has_gpu=bool(machine.gpus))
    memory.check(request.config, machine)
    make.check(request.config)
    preflight.check(request.config, machine)
    os.environ[preflight.CHECKED] = "1"
    if not machine.gpus:
        os.environ["DS_ACCELERATOR"] = "cpu"
    launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or "deepspeed"
    sys.exit(run(command(launcher, machine, settled(request, arguments))))


def settled(request: Request, arguments: Sequence[str]) -> list[str]:
    """The arguments, with what has been chosen here written out, so that every rank chooses the same."""
    if request.resumes:
        return [*arguments, f"--resume={request.resumes}"]
    return ["--preset", request.preset, *arguments] if request.reason else list(arguments)


def command(launcher: str, machine: hardware.Hardware, arguments: Sequence[str]) -> list[str]:
    """A free port, so that two runs can share a machine; `--include` where only some cards are meant, because the
    launcher ignores CUDA_VISIBLE_DEVICES beside `--num_gpus`. The launcher's own errors only repeat ours."""
    devices = f"--num_gpus={max(1, len(machine.gpus))}"
    some = [gpu.index for gpu in machine.gpus] != list(range(len(machine.gpus)))
    if machine.gpus and (some or os.environ.get("CUDA_VISIBLE_DEVICES")):
        devices = f"--include=localhost:{','.join(str(gpu.index) for gpu in machine.gpus)}"
    quiet = ["--log_level=critical", f"--master_port={hardware.free_port()}"]
    return [launcher, *quiet, devices, "--no_local_rank", str(TRAIN), *arguments]


def run(launch: Sequence[str]) -> int:
    """The exit status of the launcher. It has a session of its own, so that Ctrl-C reaches it once and through here.

    SIGUSR1 is for the ranks, its grandchildren, which save and stop (ranks/stopping.py). The launcher would die of it,
    and Slurm sends it to every process of a step: so it is held back, in all that is started here, until a rank asks.
    While the launcher starts there may be no rank yet: then it is sent again and again until there is one."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    child = subprocess.Popen(launch, start_new_session=True)

    def end(number: int, frame: FrameType | None) -> None:
        os.killpg(child.pid, signal.SIGTERM)

    def tell_the_ranks(number: int, frame: FrameType | None) -> None:
        ranks = [rank for launcher in _children(child.pid) for rank in _children(launcher) if _is_a_rank(rank)]
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGUSR1)
        if not ranks:
            signal.alarm(TELL_AGAIN_S)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    for number in (signal.SIGUSR1, signal.SIGALRM):
        signal.signal(number, tell_the_ranks)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    return as_a_shell_says_it(child.wait())


def _is_a_rank(process: int) -> bool:
    """And not what the launcher asks of a compiler while it starts."""
    with suppress(OSError):  # gone in the meantime
        return str(TRAIN).encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def _children(parent: int) -> list[int]:
    """As Linux lists them; none of a process that has ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # gone in the meantime
            if int(status.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(status.parent.name))
    return found


def as_a_shell_says_it(status: int) -> int:
    """A rank that signal 9 has killed ends with -9; of the launcher, which leaves with that, the system makes 247. A
    shell, srun and the job scripts know it as 137."""
    if status < 0:
        return 128 - status
    return 128 + 256 - status if status > 256 - signal.NSIG else status


if __name__ == "__main__":
    sys.exit(answering_errors(main, debug="--debug" in sys.argv))
