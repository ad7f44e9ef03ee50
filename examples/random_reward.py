"""A control: each answer gets 0 or 1 by chance. What a model gains with that is no effect of the reward.

./run_deepspeed.sh reward.custom=examples/random_reward.py:random_reward reward.weights.correct=0

A comparison of a method needs such a control: some models answer better after training with random rewards, because
training makes frequent what they did often already (arXiv 2506.10947).
"""

import random


def random_reward(completions, **columns):
    return [float(random.random() < 0.5) for _ in completions]
