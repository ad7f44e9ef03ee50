"""The shipped default, start to end through the launcher, once for each seed.

python bench/seeds.py --seeds 5 [--json]        writes bench/results/seeds.json
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import describe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/seeds.json"
PHASES = ("problem", "rollout", "advantage", "batch", "step")


def one_run(seed: int, folder: Path, more: list[str]) -> dict[str, Any]:
    began = time.perf_counter()
    settings = [*more, f"run.seed={seed}", f"run.dir={folder}"]
    subprocess.run(
        [sys.executable, "-m", "trainer.commands.main", "train", "--preset", "nano", *settings], check=True, cwd=ROOT
    )
    wall = time.perf_counter() - began
    base, trained, merged = (one["accuracy"] for one in json.loads((folder / "eval.json").read_text())["evaluations"])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [record for record in metrics if record["step"] > 0]  # step 0 is the evaluation of the base
    phases = {phase: sum(record[f"time/{phase}"] for record in metrics) for phase in PHASES}
    return {
        "seed": seed,
        "base": base,
        "trained": trained,
        "merged": merged,
        "gain": trained - base,
        "wall_s": round(wall, 1),
        "training_s": round(sum(phases.values()), 1),
        "phases_s": {phase: round(seconds, 2) for phase, seconds in phases.items()},
        "sampled_accuracy": [round(record["accuracy/strict"], 3) for record in metrics],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the result instead of a table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [one_run(seed, Path(folder) / str(seed), options.more) for seed in range(options.seeds)]
    result = {"machine": describe(), "least_gain": min(run["gain"] for run in runs), "runs": runs}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if options.json:
        print(json.dumps(result))
        return
    for run in runs:
        print(f"seed {run['seed']}  {run['base']:.1%} -> {run['trained']:.1%}  {run['wall_s']:.0f} s")
    print(f"mean gain {fmean(run['gain'] for run in runs):.1%}, written to {options.out}")


if __name__ == "__main__":
    main()
