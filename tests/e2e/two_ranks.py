"""train.py under the launcher of DeepSpeed with two ranks, started as `octet train` does it on two cards.

python -m tests.e2e.two_ranks SETTINGS
"""

import os
import sys

from trainer.machine import hardware
from trainer.ranks import launch

if __name__ == "__main__":
    cards = [hardware.Gpu(index, "", "", 0.0) for index in range(2)]
    command = launch.command(hardware.Hardware(tuple(cards), cores=2), sys.argv[1:])
    sys.exit(launch.run_to_its_end(command, os.environ))
