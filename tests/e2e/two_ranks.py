"""train.py under the launcher of DeepSpeed with two ranks, started as `trainer.commands.train` does it on two cards.

python -m tests.e2e.two_ranks SETTINGS
"""

import os
import sys

from trainer.commands import train
from trainer.machine import hardware

if __name__ == "__main__":
    cards = [hardware.Gpu(index, "", "", 0.0) for index in range(2)]
    command = train.command(hardware.Hardware(tuple(cards), cores=2), sys.argv[1:])
    sys.exit(train.run_to_its_end(command, os.environ))
