"""The program that the deepspeed launcher starts: `deepspeed --num_gpus=1 train.py --preset 8gb algorithm.lr=2e-5`.

It checks the configuration first, so a typo is answered before torch is imported.
"""

import faulthandler
import os
import sys

from trainer.machine.import_guard import naming_missing_packages

with naming_missing_packages():
    from trainer.config.request import parse_command_line
    from trainer.config.settings import Config
    from trainer.errors import OctetError
    from trainer.machine import hardware, quiet
    from trainer.machine.exits import answering_errors, leave, listen
    from trainer.plan import preflight, read_data
    from trainer.ranks import signal_handlers, slurm


def main() -> None:
    faulthandler.enable(all_threads=False)  # a crash in compiled code names the line that called it
    listen()
    signal_handlers.listen()
    slurm.adopt_ranks()
    request = parse_command_line(sys.argv[1:])
    if request.dry_run:
        print(request.resolved, end="")
        return
    try:
        data = checked_and_read(request.config)
    except OctetError as error:  # for which the other ranks would wait until Slurm ends them
        slurm.report_failure(f"rank {os.environ.get('RANK', '0')} ended with {error}")
        raise
    if os.environ.get("RANK", "0") == "0":  # the imports take seconds
        name = request.config.model.name
        print(f"octet: loading {name}", file=sys.stderr if request.json else sys.stdout, flush=True)

    preflight.import_libraries(request.config)
    from trainer.run import job

    job.run(request, data)


def checked_and_read(config: Config) -> read_data.Data | None:
    """Check whether the run can start here. One rank of a machine reads the data before the imports, so that a bad
    record is an error at once, printed once."""
    machine = hardware.detect()
    preflight.must_leave_our_cards(machine, config.rollout.vllm, int(os.environ.get("WORLD_SIZE", "1")))
    preflight.check(config, machine)
    quiet.quiet()
    hardware.prepare_cuda(config.rollout.engine)
    return read_data.read(config) if os.environ.get("LOCAL_RANK", "0") == "0" else None


if __name__ == "__main__":
    leave(answering_errors(main, debug="--debug" in sys.argv))
