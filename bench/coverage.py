"""How often the intervals of `octet study` contain the truth, how often it raises a false alarm, and what it finds.

python bench/coverage.py                   writes bench/results/coverage.json; twenty minutes on one core
python bench/coverage.py --spread 0.5      replaces the designs with this spread of seeds in that file

A problem has a difficulty, and each arm its own deviation from it for each problem, for each seed, and for each seed
and problem, all normal in logits. The truth is the mean difference over all seeds and problems.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
from numpy.random import Generator as Random

from machine import describe
from trainer.stats import SIGNIFICANT, Effect, corrected, effect

Answers = np.ndarray[Any, np.dtype[np.float64]]
RESULTS = Path(__file__).parent / "results/coverage.json"
DIFFICULTY, DEVIATION = 1.5, 0.5  # standard deviations, in logits
PARTS = ("coverage", "false_alarms", "power")
ARMS = 5  # of a study without any effect: the base, the first arm, and three more


@dataclass(frozen=True)
class Design:
    seeds: int
    problems: int
    before: float  # accuracy
    after: float
    of_seed: float  # standard deviation of the seeds, in logits


DESIGNS = [
    Design(seeds, problems, *accuracies, of_seed)
    for seeds, problems, accuracies, of_seed in product(
        (3, 5, 10), (200, 1000), ((0.5, 0.5), (0.1, 0.1), (0.4, 0.6)), (0.0, 0.1, 0.2)
    )
] + [Design(3, 1000, 0.5, 0.5, 0.5)]  # the seeds of a control differ as much


def level(accuracy: float, of_seed: float) -> float:
    """Return the logit with which an arm has this accuracy on average over problems and seeds."""
    spread = (DIFFICULTY**2 + 2 * DEVIATION**2 + of_seed**2) ** 0.5
    nodes = np.array([NormalDist().inv_cdf((place + 0.5) / 400) * spread for place in range(400)])
    low, high = -20.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 / (1 + np.exp(-middle - nodes))).mean() < accuracy else (low, middle)
    return low


def answers(rng: Random, design: Design, logit: float, easy: Answers) -> Answers:
    """Return whether an arm solves each problem, in a row for each seed."""
    size = (design.seeds, design.problems)
    own = logit + easy + rng.normal(0, DEVIATION, design.problems)
    logits = own + rng.normal(0, design.of_seed, (design.seeds, 1)) + rng.normal(0, DEVIATION, size)
    return (logits > rng.logistic(size=size)).astype(float)


def difficulties(rng: Random, design: Design) -> Answers:
    return rng.normal(0, DIFFICULTY, design.problems)


def of(ones: Answers, others: Answers) -> Effect:
    return effect((ones - others).tolist())


def effects(rng: Random, design: Design, studies: int) -> Iterator[Effect]:
    """Yield what studies of two arms find."""
    levels = [level(accuracy, design.of_seed) for accuracy in (design.after, design.before)]
    for _ in range(studies):
        easy = difficulties(rng, design)
        yield of(*(answers(rng, design, logit, easy) for logit in levels))


def coverage(rng: Random, design: Design, studies: int) -> dict[str, Any]:
    found = [*effects(rng, design, studies)]
    truth = design.after - design.before
    inside = fmean(one.interval[0] <= truth <= one.interval[1] for one in found)
    width = fmean(one.interval[1] - one.interval[0] for one in found) / 2
    return {**vars(design), "coverage": inside, "half_width": width}


def false_alarms(rng: Random, design: Design, studies: int) -> dict[str, Any]:
    """Return the share of studies without any effect that call an arm better or worse after Holm's correction."""
    untrained = replace(design, seeds=1, of_seed=0.0)  # it answers greedily, and always the same
    logit, of_base, alarms = level(design.before, design.of_seed), level(design.before, 0.0), 0
    for _ in range(studies):
        easy = difficulties(rng, design)
        base = answers(rng, untrained, of_base, easy)
        first, *others = (answers(rng, design, logit, easy) for _ in range(ARMS - 1))
        pairs = [(one, base) for one in (first, *others)] + [(one, first) for one in others]
        alarms += min(corrected([of(*pair).p for pair in pairs])) < SIGNIFICANT
    return {**vars(design), "arms": ARMS - 1, "false_alarms": alarms / studies}


def power(rng: Random, design: Design, studies: int) -> dict[str, Any]:
    """Return how often a difference is found that the studies call detectable."""
    gain = fmean(one.detectable() for one in effects(rng, design, studies // 10))
    changed = Design(design.seeds, design.problems, design.before, design.before + gain, design.of_seed)
    found = fmean(one.p < SIGNIFICANT and one.value > 0 for one in effects(rng, changed, studies))
    return {**vars(changed), "gain": gain, "found": found}


def simulated(designs: list[Design], studies: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    without_effect = [one for one in designs if one.before == one.after]
    return {
        "machine": describe(),
        "studies": studies,
        "coverage": [coverage(rng, one, studies) for one in designs],
        "false_alarms": [false_alarms(rng, one, studies) for one in without_effect],
        "power": [power(rng, one, studies) for one in without_effect if one.of_seed],
    }


def merged(found: dict[str, Any], new: dict[str, Any], spread: float) -> dict[str, Any]:
    """Return what was found, with the new results in place of those with this spread."""
    assert found["studies"] == new["studies"], f"--studies {found['studies']}, as in the file"
    kept = {part: [one for one in found[part] if one["of_seed"] != spread] for part in PARTS}
    return found | {part: kept[part] + new[part] for part in PARTS} | {"added": new["machine"]["command"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--spread", type=float, help="only designs with this spread of seeds; the file has the rest")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    designs = [one for one in DESIGNS if options.spread in (None, one.of_seed)]
    result = simulated(designs, options.studies)
    if options.spread is not None and options.out.is_file():
        result = merged(json.loads(options.out.read_text()), result, options.spread)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, key in zip(PARTS, ("coverage", "false_alarms", "found"), strict=True):
        values = [one[key] for one in result[name]]
        if values:
            print(f"{name:<13} {min(values):.1%} to {max(values):.1%}, mean {fmean(values):.1%}")


if __name__ == "__main__":
    main()
