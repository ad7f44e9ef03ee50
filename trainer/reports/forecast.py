"""A forecast of a run's final accuracy, with its uncertainty, by the curve `end - gap * exp(-step / scale)`.

For each of many ends and scales, least squares give the gap. The squared error of a curve gives its likelihood. The
forecast is the median over all curves, weighted by their likelihood, and the interval has 90 % of the weight. The noise
of a value is at least that of its number of answers. `tests/reports/test_forecast.py` compares this with finished runs.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import exp
from statistics import fmean

from trainer.run_folder.reader import RunFiles
from trainer.stats import Share

LEAST, MOST = 4, 24  # points of a curve; if there are more, neighbours are averaged
ENDS = [end / 100 for end in range(101)]
SCALES = [0.1 * 1.2**place for place in range(14)]  # up to 1.1, as multiples of the steps so far
TAILS = (0.05, 0.5, 0.95)
FURTHER, AHEAD = 2, 5  # how far to look, as multiples of the steps so far: for a finished run, and for a live one

Point = tuple[float, float]  # a step, and the share of right answers


def outlook(run: RunFiles) -> str:
    """Return a sentence about the accuracy after more steps, from a run's evaluations, or from its training answers."""
    measure, step = run.measure, run.steps
    if measure.is_reward:
        return ""
    points: list[Point] = [(line["step"], share.value) for share, line in run.evaluated]
    what, answers = "held-out accuracy", max((line.get("eval/problems", 1) for line in run.metrics), default=1)
    if len(points) < LEAST and not run.history.chooses_problems:
        points = [(line["step"], line[measure.of_training]) for line in run.metrics if measure.of_training in line]
        rollout, what = run.config.rollout, "accuracy in training"
        answers = rollout.problems * rollout.group_size
    later = FURTHER * step if run.has_ended else min(AHEAD * step, run.total_steps)
    then, gain = forecast(points, answers, later), forecast(points, answers, later, since=step)
    if then is None or gain is None or later <= step:
        return ""
    value, low, high = (round(100 * share) for share in then)
    points_gained, least, most = (f"{round(100 * share, 1) + 0.0:+}" for share in gain)  # 0.0 is added to a -0.0
    return (
        f"Forecast: {what} near {value} % (90 % interval {low} to {high}) after step {later}; {later - step} more "
        f"steps are worth about {points_gained} points ({least} to {most})."
    )


def forecast(points: Sequence[Point], answers: int, step: float, since: float | None = None) -> Share | None:
    """Return the share of right answers at a later step, or how much it rises from the step `since` to that one. Return
    None if there are too few points. Each point is a share of `answers` answers."""
    points = [(x, y) for x, y in points if 0 <= y <= 1]  # the values come from a file
    if len(points) < LEAST:
        return None
    size = -(-len(points) // MOST)
    parts = [points[index : index + size] for index in range(0, len(points), size)]
    means = [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]
    if not (curves := sorted(_curves(means, step, since), key=lambda curve: curve[1])):
        return None
    least, level = min(error for error, _ in curves), fmean(y for _, y in means[len(means) // 2 :])
    noise = max(level * (1 - level), 0.05) / (answers * size)
    noise = max(noise, least / max(1, len(means) - 3), 1e-9)
    weights = [*accumulate(exp((least - error) / noise / 2) for error, _ in curves)]
    low, middle, high = (curves[bisect_left(weights, tail * weights[-1])][1] for tail in TAILS)
    return Share(middle, low, high)


def _curves(points: Sequence[Point], step: float, since: float | None) -> Iterator[Point]:
    """Yield for each curve its sum of squared errors, and its value at a later step, or how much it rises to it."""
    for scale in (points[-1][0] * share for share in SCALES):
        decays = [exp(-x / scale) for x, _ in points]
        size = sum(decay * decay for decay in decays)
        for end in ENDS:
            gap = sum(decay * (end - y) for decay, (_, y) in zip(decays, points, strict=True)) / size
            if 0 <= end - gap <= 1:
                error = sum((end - gap * decay - y) ** 2 for decay, (_, y) in zip(decays, points, strict=True))
                yield error, (end if since is None else gap * exp(-since / scale)) - gap * exp(-step / scale)
