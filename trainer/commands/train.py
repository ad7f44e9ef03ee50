"""Start train.py with the same arguments: through DeepSpeed's launcher on several cards, else as one process. Under
`srun`, which has already started a process for each device, this process becomes train.py. The settings are checked
first, so that a typo is reported within a second, and not after torch has been imported three times."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial

from trainer.config import ds_config
from trainer.config.request import Request, parse_command_line
from trainer.machine import hardware
from trainer.machine.safe_text import print
from trainer.plan import preflight
from trainer.ranks import slurm
from trainer.ranks.launch import TRAIN, alone, command, run_to_its_end
from trainer.run_folder import changed_settings


def main(arguments: Sequence[str]) -> None:
    slurm.must_be_numbers()
    machine = hardware.detect()
    is_of_mpi = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1
    if is_of_mpi or slurm.is_one_of_several() or (slurm.is_step() and len(machine.gpus) <= 1):
        os.execv(sys.executable, [sys.executable, str(TRAIN), *arguments])  # the same process, so signals reach it
    request = parse_command_line(arguments)
    ds_config.read(request.config.engine.ds_config)  # which may not exist
    if request.dry_run:
        print(request.resolved, end="")
        return
    say = partial(print, file=sys.stderr if request.json else sys.stdout, flush=True)
    say(f"octet: {request.reason or f'preset {request.preset}'}")
    machine = preflight.training_cards(machine, request.config.rollout.vllm)
    request.config.refuse_idle(max(1, len(machine.gpus)))
    preflight.check(request.config, machine)
    if request.config.run.dir and not request.resumes:
        changed_settings.refuse_to_lengthen(request.config.run.dir, request.config)
    environment = os.environ | {preflight.CHECKED: "1", hardware.ANSWERS: json.dumps(hardware.answers)}
    say("octet: starting DeepSpeed, which takes several seconds")
    arguments = with_choices(request, arguments)
    if len(machine.gpus) > 1:
        environment.pop("CUDA_VISIBLE_DEVICES", None)  # the command names the cards, and DeepSpeed warns about both
        sys.exit(run_to_its_end(command(machine, arguments), environment))
    sys.exit(run_to_its_end([sys.executable, "-u", str(TRAIN), *arguments], environment | alone(machine)))


def with_choices(request: Request, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with the automatic choices written out, so that all ranks use the same."""
    if request.resumes:
        return [*arguments, f"--resume={request.resumes}"]
    return ["--preset", request.preset, *arguments] if request.reason else list(arguments)
