"""Octet: GRPO training of language models on one 8 GB gaming card, and the same run on a cluster.

The folders are the steps of the algorithm; read them in the order in which a training step uses them:

    problem/       the questions, and the prompts a model sees
    rollout/       groups of answers to each prompt, from a sampler
    reward/        what each answer is worth
    advantage.py   how much better an answer is than the rest of its group
    batch/         rows of tokens, packed into micro-batches
    loss/          log-probs and objectives
    step/          one update of what is trained, by the DeepSpeed engine

`loop.py` runs these seven steps, and `records.py` has the records that travel between them.
"""

__version__ = "0.1.0"
