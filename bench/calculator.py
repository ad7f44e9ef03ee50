"""The embedded model learns to call a calculator; the control learns the same task without one.

python bench/calculator.py --seeds 3        writes bench/results/calculator.json
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results/calculator.json"
TASK = ("task.name=examples/calculator.py:build", "rollout.max_new_tokens=48", "run.merge=false", "eval.problems=200")
ARMS = {"calculator": ("task.tools=calculator", "task.calls=inline"), "control": ()}


def one_run(arm: str, seed: int, folder: Path, more: list[str]) -> dict[str, Any]:
    settings = [*TASK, *ARMS[arm], *more, f"run.seed={seed}", f"run.dir={folder}"]
    began = time.perf_counter()
    command = [sys.executable, "-m", "trainer.commands.launch", "--preset", "nano", *settings]
    subprocess.run(command, check=True, cwd=ROOT)
    wall_s = time.perf_counter() - began
    base, trained = (one["accuracy"] for one in json.loads((folder / "eval.json").read_text())["evaluations"])
    answers = [json.loads(line) for line in (folder / "eval_answers.jsonl").read_text().splitlines()]
    calls = {
        name: sum("turns" in one for one in answers if one["model"] == name) / len(answers) * 2
        for name in ("base", "trained")
    }
    return {"arm": arm, "seed": seed, "base": base, "trained": trained, "calls": calls, "wall_s": round(wall_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            one_run(arm, seed, Path(folder) / f"{arm}-{seed}", options.more)
            for seed in range(options.seeds)
            for arm in ARMS
        ]
    result = {"machine": describe(), "runs": runs}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for run in runs:
        print(f"{run['arm']:<11} seed {run['seed']}  {run['base']:.1%} -> {run['trained']:.1%}, calls {run['calls']}")


if __name__ == "__main__":
    main()
