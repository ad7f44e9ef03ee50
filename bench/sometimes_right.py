"""Keep the problems that a model solves sometimes: the others give a group of equal rewards, which teaches nothing.

python bench/sometimes_right.py PROBLEMS.jsonl EVALUATION KEPT.jsonl

EVALUATION is the folder of an `octet eval` of these problems with `--samples`. A problem is kept if some of its samples
are right and some are wrong.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    problems, evaluation, kept = map(Path, sys.argv[1:4])
    outcomes: dict[str, set[bool]] = defaultdict(set)
    for line in (evaluation / "eval_answers.jsonl").read_text(encoding="utf-8").splitlines():
        answer = json.loads(line)
        if answer["temperature"]:
            outcomes[answer["question"]].add(answer["correct_strict"])
    lines = problems.read_text(encoding="utf-8").splitlines()
    mixed = [line for line in lines if len(outcomes[json.loads(line)["question"]]) == 2]
    kept.write_text("".join(f"{line}\n" for line in mixed), encoding="utf-8")
    print(f"{len(mixed):,} of {len(lines):,}")


if __name__ == "__main__":
    main()
