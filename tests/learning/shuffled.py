"""train.py with the advantages of every group shuffled: the same job, and nothing to learn from."""

import random
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

import train  # noqa: E402
from trainer.advantage import ADVANTAGES, normalised  # noqa: E402


def shuffled(rewards_G, settings, step_deviation):
    values = normalised(rewards_G, settings, step_deviation)
    random.shuffle(values)
    return values


if __name__ == "__main__":
    random.seed(0)
    ADVANTAGES["grpo"] = shuffled
    train.main()
