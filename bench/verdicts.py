"""What smaller studies would have said: every choice of three seeds of a study, judged as a study of its own.

python bench/verdicts.py            reads bench/results/studies/controls.json, writes bench/results/verdicts.json
"""

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from trainer.config.study import BASE
from trainer.reports.study import BETTER, CANNOT_TELL, WORSE
from trainer.stats import SIGNIFICANT, corrected, effect

RESULTS = Path(__file__).parent / "results"
SEEDS = 3


def judged(found: Mapping[str, Any], arms: Sequence[str], seeds: Sequence[int]) -> dict[str, str]:
    """Return the verdict on each arm against the base by these seeds, corrected as in a study of these arms."""
    answers = {arm: one[found["paid"]] for arm, one in found["answers"].items()}
    first = found["first"]
    pairs = [(arm, BASE) for arm in arms] + [(arm, first) for arm in arms if arm != first]
    effects = [effect([_difference(answers[a][seed], answers[b][seed]) for seed in seeds]) for a, b in pairs]
    ps = corrected([one.p for one in effects])
    return {
        arm: CANNOT_TELL if p >= SIGNIFICANT else BETTER if one.value > 0 else WORSE
        for (arm, against), one, p in zip(pairs, effects, ps, strict=True)
        if against == BASE
    }


def counts(found: Mapping[str, Any], arms: Sequence[str], choices: Sequence[Sequence[int]]) -> dict[str, Counter[str]]:
    """Return how often each verdict is said of each arm."""
    verdicts = [judged(found, arms, seeds) for seeds in choices]
    return {arm: Counter(one[arm] for one in verdicts) for arm in arms}


def _difference(one: str, other: str) -> list[float]:
    return [float(a) - float(b) for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="controls", help="name of the study (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "verdicts.json", help="the file to write")
    options = parser.parse_args()
    found = json.loads((RESULTS / f"studies/{options.study}.json").read_text())
    choices = [*combinations(range(len(found["answers"][BASE][found["paid"]])), SEEDS)]
    every = [arm for arm in found["answers"] if arm != BASE]
    result = {
        "study": options.study,
        "studies": len(choices),
        "seeds": SEEDS,
        "verdicts": counts(found, every, choices),
    }
    if "random" in every:
        result["with_random_alone"] = counts(found, [found["first"], "random"], choices)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
