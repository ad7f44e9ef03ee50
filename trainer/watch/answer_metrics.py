"""Metrics of the sampled answers of a step."""

from collections.abc import Iterable, Sequence
from itertools import compress
from statistics import fmean

from trainer.answers.strip_thinking import after_thinking
from trainer.records import ScoredGroup
from trainer.watch.measure import STRICT, Measure
from trainer.watch.tally import Correlation, Max, Min, Std, Tally

NGRAM, SHORTEST_LOOP = 4, 48  # tokens


def tally_groups(tally: Tally, groups: Iterable[ScoredGroup], measure: Measure = STRICT) -> None:
    """Count properties of the sampled answers: the reward and its parts, length, and accuracy if the task has one."""
    for group in groups:
        tally.add("dead_groups", group.is_dead)
        if group.dead_by != "reward":
            tally.add("dead_groups/unequal", group.is_dead and len({*group.rewards_G} - {None}) > 1)
        if not measure.is_reward:
            _tally_paid(tally, group, measure)
        if not measure.is_reward or group.prompt.problem.gold:
            tally.add("accuracy/strict", sum(score.correct_strict for score in group.scores), len(group.scores))
            tally.add("accuracy/lenient", sum(score.correct_lenient for score in group.scores), len(group.scores))
        gold_repeats = repeats(group.prompt.problem.gold)  # such as a grid of zeros and ones
        distinct = {completion.turns or completion.text for completion in group.completions}
        tally.add("distinct", len(distinct), len(group.completions))
        _tally_length(tally, group)
        for completion, score in zip(group.completions, group.scores, strict=True):
            _, _, is_thinking = after_thinking(group.prompt.text + completion.text)
            tally.add("length", completion.length)
            if completion.turns:
                tally.add("turns", sum(turn.role == "model" for turn in completion.turns))
                tally.add("observed", len(completion.tokens) - completion.length)
                for reply in (turn.text for turn in completion.turns if turn.role == "environment"):
                    tally.add("tool_errors", any(line.startswith("Error: ") for line in reply.splitlines()))
            tally.add("truncated", completion.truncated)
            tally.add("unfinished_thinking", completion.truncated and is_thinking)
            tally.add("empty", not completion.text.strip())
            tokens = [*compress(completion.tokens, completion.mask)]
            tally.add("repetitive", repeats(tokens) and not gold_repeats)
            if (reward := score.reward) is not None:
                tally.merge({"reward": Std(reward, reward**2, 1.0)})
                tally.merge({"reward/min": Min(reward), "reward/max": Max(reward)})
                if part := group.prompt.problem.part:
                    tally.add(f"part/reward/{part}", reward)
            for name, value in score.components.items():
                if value is not None:
                    tally.add(f"reward/{name}", value)


def _tally_paid(tally: Tally, group: ScoredGroup, measure: Measure) -> None:
    """Count what matters if right answers are paid: dead groups of one kind, and the accuracy of a mixture's part."""
    lenient = [score.correct_lenient for score in group.scores]
    tally.add("dead_groups/wrong", group.is_dead and not any(lenient))
    tally.add("dead_groups/right", group.is_dead and all(lenient))
    if part := group.prompt.problem.part:
        tally.add(f"part/accuracy/{part}", sum(measure.values(group.scores)), len(group.scores))


def _tally_length(tally: Tally, group: ScoredGroup) -> None:
    """Add the sums that relate reward and length among the right and among the wrong answers of a group."""
    pairs = [
        (score.correct_lenient, float(completion.length), score.reward)
        for completion, score in zip(group.completions, group.scores, strict=True)
        if score.reward is not None
    ]
    for is_right in (False, True):
        equals = [(length, reward) for right, length, reward in pairs if right == is_right]
        if equals:
            length, reward = (fmean(values) for values in zip(*equals, strict=True))
            centred = [(x - length, y - reward) for x, y in equals]
            products = (sum(x * y for x, y in centred), sum(x * x for x, _ in centred), sum(y * y for _, y in centred))
            tally.merge({"reward_length": Correlation(*products, 0.0, len(equals))})
    if pairs:
        mean = fmean(reward for *_, reward in pairs)
        differences = sum((reward - mean) ** 2 for *_, reward in pairs)
        tally.merge({"reward_length": Correlation(0.0, 0.0, 0.0, differences, 0.0)})


def repeats(tokens: Sequence[object]) -> bool:
    """Return True for a long answer in which over 70 % of the runs of four tokens (or letters) repeat earlier ones."""
    if len(tokens) < SHORTEST_LOOP:
        return False
    runs = [tuple(tokens[start : start + NGRAM]) for start in range(len(tokens) - NGRAM + 1)]
    return len(set(runs)) < 0.3 * len(runs)
