"""Octet: GRPO on one gaming card, and the same run on a cluster.

Read the files in the order in which a training step uses them:

    tasks/        problem     what is asked
    rollouts.py   rollout     a group of answers to each problem, from a sampler
    rewards/      reward      what each answer is worth
    advantages.py advantage   how much better than the rest of its group
    batches.py    batch       rows of tokens, right-packed, by token budget
    prepare.py                what an objective has to know before the first update
    losses.py     loss        log-probs times advantages, over one divisor (flat.py, logprobs.py, kl.py, aggregation.py)
    policy/       step        one update of what is trained, by the DeepSpeed engine

`loop.py` is these seven words in this order. `types.py` has the records that travel between them.
"""
