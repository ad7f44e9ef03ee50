"""How much two ranks make of a second core: one rank on one core against two ranks on two, the same global batch.

python bench/scaling.py [--steps 15] [--rounds 3]

The embedded model, every rank held to one core. What two ranks lose is told apart with two more kinds of run: one rank
with half of the problems (small batches are less efficient), and two such runs at the same time that know nothing of
each other (cores share memory, and other programs use them). What is left of the loss is waiting for the other rank,
and sending.
All kinds take turns, so that whatever else the machine does hits all of them; medians over the rounds.
"""

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
PROBLEMS = 16
KINDS = ("one rank", "half the problems", "two apart", "two ranks")


def measure_once(kind: str, steps: int, folder: Path) -> dict[str, float]:
    """Mean seconds of a step and of its phases."""
    if kind == "two ranks":
        ranks, copies, problems = 2, 1, PROBLEMS
    else:
        ranks, copies, problems = 1, 2 if kind == "two apart" else 1, PROBLEMS if kind == "one rank" else PROBLEMS // 2
    started = [
        process
        for copy in range(copies)
        for process in start(ranks, problems, steps, folder / str(copy), first_core=copy)
    ]
    assert [process.wait() for process in started] == [0] * len(started), f"{kind}: a run failed"
    return mean_of([seconds_of(folder / str(copy)) for copy in range(copies)])


def start(ranks: int, problems: int, steps: int, folder: Path, first_core: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    settings = ["--preset", "nano", f"run.steps={steps + WARM}", "eval.problems=0", "run.merge=false"]
    settings += [f"rollout.problems={problems}", "rollout.dead_groups=keep", f"run.dir={folder}"]
    return [
        subprocess.Popen(
            ["taskset", "-c", str(first_core + rank), sys.executable, str(ROOT / "train.py"), *settings],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]


def seconds_of(folder: Path) -> dict[str, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM:]
    seconds = {name: mean(line[f"time/{name}"] for line in lines) for name in PHASES}
    return {**seconds, "whole": sum(seconds.values())}


def mean_of(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: mean(run[name] for run in runs) for name in runs[0]}


def measure(steps: int, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS[:: 1 if number % 2 == 0 else -1]:
            with tempfile.TemporaryDirectory() as folder:
                runs[kind].append(measure_once(kind, steps, Path(folder)))
    seconds = {kind: {name: median(run[name] for run in done) for name in done[0]} for kind, done in runs.items()}
    one, half, apart, two = (seconds[kind] for kind in KINDS)
    each = [first["whole"] / (2 * second["whole"]) for first, second in zip(runs["one rank"], runs["two ranks"])]
    return {
        "steps": steps,
        "rounds": rounds,
        "seconds": seconds,
        "efficiency": {name: one[name] / (2 * two[name]) for name in (*PHASES, "whole")},
        "least_and_most": [min(each), max(each)],
        "rounds_s": {kind: [run["whole"] for run in done] for kind, done in runs.items()},
        "lost_s": {
            "smaller batches": half["whole"] - one["whole"] / 2,
            "a second core that is not free": apart["whole"] - half["whole"],
            "waiting and sending": two["whole"] - apart["whole"],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    before = {"machine": describe(), "load_before": os.getloadavg()[0]}
    result = before | measure(options.steps, options.rounds)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"efficiency of two ranks: {result['efficiency']['whole']:.0%}, written to {options.out}")


if __name__ == "__main__":
    main()
