"""Start `deepspeed train.py` on the devices that are here; the arguments go on to train.py.

The settings are read first, so a typo or a model that cannot be had is answered in a second, not after three imports
of torch.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer import hardware, hub
from trainer.cli import answering_errors
from trainer.rewards import graders
from trainer.settings import parse_command_line

TRAIN = Path(__file__).parent.parent / "train.py"


def main() -> None:
    arguments = sys.argv[1:]
    request = parse_command_line(arguments)
    if request.dry_run:
        print(request.config.to_yaml(), end="")
        return
    if request.reason:
        print(
            f"octet: preset {request.preset} ({request.reason})", file=sys.stderr if request.json else None, flush=True
        )
        arguments = ["--preset", request.preset, *arguments]
    hub.check(request.config)
    graders.check(request.config)
    machine = hardware.detect()
    if not machine.gpus:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent)) or "deepspeed"
    os.execvp(launcher, command(launcher, machine, arguments))


def command(launcher: str, machine: hardware.Hardware, arguments: Sequence[str]) -> list[str]:
    """A free port, so that two runs can share a machine; `--include` where the user has chosen cards, because the
    launcher ignores CUDA_VISIBLE_DEVICES beside `--num_gpus`."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = (
        [f"--include=localhost:{chosen}"] if chosen and machine.gpus else [f"--num_gpus={max(1, len(machine.gpus))}"]
    )
    return [launcher, "--quiet", f"--master_port={_free_port()}", *devices, "--no_local_rank", str(TRAIN), *arguments]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(answering_errors(main, debug="--debug" in sys.argv))
