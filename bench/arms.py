"""Experiments with several arms and seeds; each run goes through the launcher.

python bench/arms.py calculator --seeds 3           writes bench/results/calculator.json
python bench/arms.py teaching --seeds 5 --jobs 2
python bench/arms.py addition --seeds 3 model.name=FOLDER     SmolLM2 in a folder of scripts/smollm2.py
python bench/arms.py gsm8k model.name=FOLDER task.data_dir=GSM8K

calculator  The embedded model learns to call a calculator; the control learns the same task without one.
teaching    The embedded model learns its task from a teacher (itself, after 60 steps of worked solutions), or by GRPO.
addition    SmolLM2 learns to add numbers of two digits: by GRPO, from as many solutions, or with a random reward.
gsm8k       SmolLM2 learns from GSM8K's solutions and then by GRPO, with a right or a random reward; or by GRPO alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe

ROOT = Path(__file__).parent.parent
RANDOM_REWARD = ("reward.custom=examples/random_reward.py:random_reward", "reward.weights.correct=0")


@dataclass(frozen=True)
class Experiment:
    """Arguments of the launcher: those of all runs, and those of each arm. FOLDER stands for that of the experiment."""

    common: Sequence[str]
    arms: Mapping[str, Sequence[str]]
    first: Sequence[str] = ()  # a run that the arms need


EXPERIMENTS = {
    "calculator": Experiment(
        ["--preset=nano", "task.name=examples/calculator.py:build", "rollout.max_new_tokens=48", "eval.problems=200"],
        {"calculator": ["task.tools=calculator", "task.calls=inline"], "control": []},
    ),
    "teaching": Experiment(
        ["--preset=nano", "run.steps=40", "eval.every=5", "eval.problems=512"],
        {
            "teacher": [
                "--recipe=distill",
                "teacher.name=nano",
                "teacher.quantize=none",
                "teacher.adapter=FOLDER/first/adapter",
            ],
            "grpo": [],
        },
        ["--preset=nano", "warmup.only=true", "warmup.steps=60", "run.dir=FOLDER/first"],
    ),
    "addition": Experiment(
        ["--preset=smollm2"],
        {
            "right": ["eval.every=10"],
            "random": ["eval.every=10", *RANDOM_REWARD],
            "supervised": ["warmup.only=true", "warmup.steps=60", "warmup.problems=64", "warmup.every=10"],
        },
    ),
    "gsm8k": Experiment(
        ["--preset=smollm2-gsm8k"],
        {
            "warm_grpo": [],
            "warm_random": [*RANDOM_REWARD, "reward.weights.format=0"],
            "grpo": ["warmup.steps=0"],
        },
    ),
}


def launch(arguments: Sequence[str], folder: Path) -> float:
    """Return the seconds of a run."""
    began = time.perf_counter()
    written = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    subprocess.run([sys.executable, "-m", "trainer.commands.launch", *written, "run.merge=false"], check=True, cwd=ROOT)
    return time.perf_counter() - began


def one_run(experiment: Experiment, arm: str, seed: int, folder: Path, more: Sequence[str]) -> dict[str, Any]:
    here = folder / f"{arm}-{seed}"
    settings = [*experiment.common, *experiment.arms[arm], *more, f"run.seed={seed}", f"run.dir={here}"]
    wall_s = launch(settings, folder)
    found = {"arm": arm, "seed": seed, "wall_s": round(wall_s, 1), **measured(here)}
    if (here / "warmup").exists():
        found["warmup"] = measured(here / "warmup")
    return found


def measured(folder: Path) -> dict[str, Any]:
    """Return what the evaluations of a run found, and what it sampled in each step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("eval/accuracy", "eval/lenient", "eval/loss")
    evaluated = [line for line in lines if "eval/accuracy" in line]
    curve = [{"step": line["step"]} | {name: line[name] for name in names if name in line} for line in evaluated]
    steps = [line for line in lines if "time/step" in line]
    found = {"problems": evaluated[0]["eval/problems"], "curve": curve}
    found |= {name: [line[name] for line in steps if name in line] for name in ("accuracy/strict", "entropy", "loss")}
    if calls := shares_of_calls(folder):
        found["calls"] = calls
    return {name: value for name, value in found.items() if value != []}


def shares_of_calls(folder: Path) -> dict[str, float]:
    """Return the share of the evaluated answers that call a tool."""
    answers = [json.loads(line) for line in (folder / "eval_answers.jsonl").read_text().splitlines()]
    if not any("turns" in one for one in answers):
        return {}
    of_models = {name: [one for one in answers if one["model"] == name] for name in ("base", "trained")}
    return {name: sum("turns" in one for one in some) / len(some) for name, some in of_models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--arms", nargs="+", help="only these")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; their seconds are then not comparable")
    parser.add_argument("--out", type=Path, help="the file to write in place of the one in bench/results/")
    parser.add_argument("more", nargs="*", metavar="key=value", help="settings of every run")
    options = parser.parse_intermixed_args()
    experiment = EXPERIMENTS[options.experiment]
    arms = [arm for arm in experiment.arms if arm in (options.arms or experiment.arms)]
    out = options.out or ROOT / f"bench/results/{options.experiment}.json"
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folder = Path(scratch)
        if experiment.first:
            launch([*experiment.first, *options.more], folder)
        planned = [(arm, seed) for seed in range(options.seeds) for arm in arms]
        runs = list(pool.map(lambda one: one_run(experiment, *one, folder, options.more), planned))
    result = {"machine": describe(), "at_once": options.jobs, "runs": runs}
    out.write_text(json.dumps(result, indent=1) + "\n")
    for run in runs:
        strict = " -> ".join(f"{run['curve'][place]['eval/accuracy']:.1%}" for place in (0, -1))
        lenient = " -> ".join(f"{run['curve'][place]['eval/lenient']:.1%}" for place in (0, -1))
        print(f"{run['arm']:<12} seed {run['seed']}  strict {strict}, lenient {lenient}, {run['wall_s']:.0f} s")


if __name__ == "__main__":
    main()
