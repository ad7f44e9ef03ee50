"""Where the files are that come with Octet's modules: job scripts, DeepSpeed settings, train.py, pinned versions."""

from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
IS_INSTALLED = not (CHECKOUT / "run_deepspeed.sh").is_file()
ROOT = CHECKOUT / "trainer" / "shipped" if IS_INSTALLED else CHECKOUT
TRAIN = "octet train" if IS_INSTALLED else "./run_deepspeed.sh"  # the command that starts a run
