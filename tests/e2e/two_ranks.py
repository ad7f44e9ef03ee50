"""train.py under the launcher of DeepSpeed with two ranks, started as `trainer.commands.train` does it on two cards.

python -m tests.e2e.two_ranks SETTINGS
"""

import os
import sys

from trainer.commands import train
from trainer.machine.hardware import Gpu, Hardware

if __name__ == "__main__":
    cards = Gpu(0, "", "", 0.0), Gpu(1, "", "", 0.0)
    sys.exit(train.run_to_its_end(train.command(Hardware(cards, cores=2), sys.argv[1:]), os.environ))
