"""What smaller studies would have said: every choice of three seeds of a study, judged as a study of its own.

python bench/verdicts.py            reads bench/results/studies/controls.json, writes bench/results/verdicts.json
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from trainer.config.study import BASE
from trainer.estimates import SIGNIFICANT
from trainer.reports.effects import corrected, effect
from trainer.reports.study import BETTER, CANNOT_TELL, WORSE

RESULTS = Path(__file__).parent / "results"
SEEDS = 3


def judged(found: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, str]:
    """Return the verdict on each arm against the base by these seeds, corrected as `octet study` does."""
    answers = {arm: one[found["paid"]] for arm, one in found["answers"].items()}
    arms, first = [arm for arm in answers if arm != BASE], found["first"]
    pairs = [(arm, BASE) for arm in arms] + [(arm, first) for arm in arms if arm != first]
    effects = [effect([_difference(answers[a][seed], answers[b][seed]) for seed in seeds]) for a, b in pairs]
    ps = corrected([one.p for one in effects])
    return {
        arm: CANNOT_TELL if p >= SIGNIFICANT else BETTER if one.value > 0 else WORSE
        for (arm, against), one, p in zip(pairs, effects, ps, strict=True)
        if against == BASE
    }


def _difference(one: str, other: str) -> list[float]:
    return [float(a) - float(b) for a, b in zip(one, other, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", default="controls", help="name of the study (default %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS / "verdicts.json", help="the file to write")
    options = parser.parse_args()
    found = json.loads((RESULTS / f"studies/{options.study}.json").read_text())
    choices = [*combinations(range(len(found["answers"][BASE][found["paid"]])), SEEDS)]
    verdicts = [judged(found, seeds) for seeds in choices]
    counts = {arm: Counter(one[arm] for one in verdicts) for arm in verdicts[0]}
    result = {"study": options.study, "studies": len(choices), "seeds": SEEDS, "verdicts": counts}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for arm, count in counts.items():
        print(f"{arm:<20} {', '.join(f'{verdict} in {number}' for verdict, number in count.items())} of {len(choices)}")


if __name__ == "__main__":
    main()
