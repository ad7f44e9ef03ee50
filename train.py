"""What the deepspeed launcher starts: `deepspeed --num_gpus=1 train.py --preset 8gb algorithm.lr=2e-5`.

The configuration comes first: a typo is answered before torch is imported.
"""

import sys

from trainer import hub, quiet
from trainer.cli import answering_errors
from trainer.rewards import graders
from trainer.settings import parse_command_line


def main() -> None:
    request = parse_command_line(sys.argv[1:])
    if request.dry_run:
        print(request.config.to_yaml(), end="")
        return
    hub.check(request.config)
    graders.check(request.config)
    quiet.quiet()

    from trainer import job  # torch, deepspeed, transformers

    job.run(request)


if __name__ == "__main__":
    sys.exit(answering_errors(main, debug="--debug" in sys.argv))
