"""How much of a second core two ranks make use of: one rank on one core against two ranks on two, the same steps.

python bench/scaling.py [--steps 20] [--rounds 3] [--json]

The embedded model, a global batch that stays the same. The two take turns, so that whatever else the machine does hits
both; medians over the rounds. A rank is held to one core. Besides the whole step, each phase of it is timed: a phase
with much waiting for the other rank shows as one that does not get faster.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median
from typing import Any

from machine import describe

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results/scaling.json"
PHASES = ("rollout", "advantage", "batch", "step")
WARM = 2  # steps that are not counted


def run(ranks: int, steps: int, folder: Path) -> dict[str, float]:
    """Mean seconds of a step and of its phases, on rank 0, which waits for the others in all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    settings = ["--preset", "nano", f"run.steps={steps + WARM}", "eval.problems=0", "run.merge=false"]
    settings += ["rollout.dead_groups=keep", f"run.dir={folder}"]
    started = [
        subprocess.Popen(
            ["taskset", "-c", str(core), sys.executable, str(ROOT / "train.py"), *settings],
            env=os.environ | shared | {"RANK": str(core), "LOCAL_RANK": str(core), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for core in range(ranks)
    ]
    assert [one.wait() for one in started] == [0] * ranks, "a run failed"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM:]
    seconds = {name: mean(line[f"time/{name}"] for line in lines) for name in PHASES}
    return {**seconds, "whole": sum(seconds.values())}


def measure(steps: int, rounds: int) -> dict[str, Any]:
    measured: dict[int, list[dict[str, float]]] = {1: [], 2: []}
    for number in range(rounds):
        for ranks in (1, 2) if number % 2 == 0 else (2, 1):
            with tempfile.TemporaryDirectory() as folder:
                measured[ranks].append(run(ranks, steps, Path(folder) / "run"))
    seconds = {ranks: {name: median(one[name] for one in runs) for name in runs[0]} for ranks, runs in measured.items()}
    one, two = seconds[1], seconds[2]
    lost = {name: two[name] - one[name] / 2 for name in PHASES}
    return {
        "machine": describe(),
        "steps": steps,
        "rounds": rounds,
        "one_rank_s": one,
        "two_ranks_s": two,
        "efficiency": {name: one[name] / (2 * two[name]) for name in (*PHASES, "whole")},
        "least_and_most": [
            pick(a["whole"] / (2 * b["whole"]) for a, b in zip(*measured.values())) for pick in (min, max)
        ],
        "lost_s": lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print what is written")
    options = parser.parse_args()
    load = os.getloadavg()
    result = measure(options.steps, options.rounds) | {"load_before": load}
    RESULTS.write_text(json.dumps(result, indent=2) + "\n")
    if options.json:
        print(RESULTS.read_text())
        return
    print(f"efficiency of two ranks: {result['efficiency']['whole']:.0%}, written to {RESULTS}")


if __name__ == "__main__":
    main()
