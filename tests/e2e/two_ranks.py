"""train.py under the launcher of DeepSpeed with two ranks, started as `trainer.commands.train` does it on two cards.

python -m tests.e2e.two_ranks SETTINGS
"""

import os
import sys

from trainer.commands import train
from trainer.machine import hardware

if __name__ == "__main__":
    # `--include`, which chosen cards need, counts the cards of the machine
    options = ["--log_level=critical", f"--master_port={hardware.free_port()}", "--num_gpus=2", "--no_local_rank"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", *options, str(train.TRAIN), *sys.argv[1:]]
    sys.exit(train.run_to_its_end(command, os.environ))
