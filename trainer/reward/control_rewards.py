"""Placebos for experiments (`reward.control`): rewards or gold answers that say nothing about the task.

A gain that a placebo also reaches is not an effect of the reward; see docs/studies.md.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from trainer.errors import ConfigError
from trainer.records import Problem, ScoredGroup


def shuffle_golds(problems: Sequence[Problem], control: str, seed: int, columns: Sequence[str]) -> list[Problem]:
    """Return the training problems. With `shuffled_gold` their gold answers are shuffled among them, and so are the
    solutions and the `columns` that reward functions and generators read."""
    if control != "shuffled_gold":
        return list(problems)
    if not any(problem.gold for problem in problems):
        raise ConfigError("reward.control=shuffled_gold", "there are no gold answers", "Write reward.control=random")

    def with_answer_of(other: Problem, one: Problem) -> Problem:
        moved = {name: other.extra.get(name) for name in columns if name in one.extra}
        return replace(one, gold=other.gold, extra={**one.extra, "solution": other.solution, **moved})

    others = [*problems]
    random.Random(seed).shuffle(others)
    return list(map(with_answer_of, others, problems))


def replace_rewards(scored: ScoredGroup, control: str, seed: int) -> ScoredGroup:
    """Return a group with random or shuffled rewards if `control` asks for them. `seed` is that of the step. Advantages
    follow from the rewards of the group alone, so shuffling the rewards shuffles the advantages."""
    rewards = [(score.reward, score.shaping) for score in scored.scores]
    rng = random.Random(f"{seed}/{scored.prompt.problem.id}/{scored.prompt.repeat}")
    if control == "random":
        rewards = [(float(rng.random() < 0.5), 0.0) for _ in rewards]
    elif control == "shuffled_advantages":
        rng.shuffle(rewards)
    else:
        return scored
    pairs = zip(scored.scores, rewards, strict=True)
    scores = (replace(score, reward=reward, shaping=shaping) for score, (reward, shaping) in pairs)
    return replace(scored, scores=tuple(scores))
