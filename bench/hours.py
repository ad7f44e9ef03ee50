"""How well the seconds of a step are foretold: five models and settings on one CPU thread, from a calibration on one.

python bench/hours.py [--steps 6] [--rounds 2]

Random weights of small shapes with the embedded tokenizer. Seconds are those of the processor (`time.process_time`),
which other programs disturb less than a clock. The cases take turns; medians over all steps but the first of each run.
What is foretold is for the mean length of the answers that a case had, and for nothing else that was measured in it.
The constants of `plan/hours.py` were fitted to the calibration and five cases that are not here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from transformers import Qwen2Config, Qwen2ForCausalLM

from machine import describe, python_path
from trainer.config.resolve import resolve
from trainer.config.settings import Config, Model
from trainer.model.load import load_tokenizer
from trainer.model.shapes import shape_of
from trainer.plan.hours import CPU, Duration, measured
from trainer.plan.planner import Planner
from trainer.run_folder.reader import read_run

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results/hours.json"
# train.py, with the seconds of the processor in place of those of the clock
TRAIN = """
import runpy, sys, time
import trainer.watch.phases
trainer.watch.phases.perf_counter = time.process_time
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
CALIBRATION = "256 wide"


class Case(NamedTuple):
    hidden: int
    layers: int
    problems: int
    group: int
    tokens: int

    def settings(self, folder: Path) -> list[str]:
        rollout = {"problems": self.problems, "group_size": self.group, "max_new_tokens": self.tokens}
        return [
            f"model.name={self.model(folder)}",
            *(f"rollout.{key}={value}" for key, value in rollout.items()),
            *("rollout.dead_groups=keep", "prompt.max_tokens=48", "eval.problems=0", "run.merge=false"),
        ]

    def model(self, folder: Path) -> Path:
        """Return the folder of a model of this shape, which is made if there is none."""
        path = folder / f"model-{self.hidden}-{self.layers}"
        if not path.is_dir():
            tokenizer, heads = load_tokenizer(Model()), self.hidden // 32
            shape = {"hidden_size": self.hidden, "intermediate_size": 3 * self.hidden, "vocab_size": 480}
            shape |= {"num_hidden_layers": self.layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2}
            shape |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            config = Qwen2Config(**shape, max_position_embeddings=512, tie_word_embeddings=True)
            Qwen2ForCausalLM(config).save_pretrained(path)
            tokenizer.save_pretrained(path)
        return path


CASES = {
    CALIBRATION: Case(256, 4, problems=8, group=8, tokens=64),
    "192 wide, 6 layers": Case(192, 6, problems=8, group=8, tokens=64),
    "448 wide, 3 layers, half the length": Case(448, 3, problems=8, group=8, tokens=32),
    "twice the length, groups of 4": Case(256, 4, problems=8, group=4, tokens=128),
    "320 wide, 8 layers, 4 problems": Case(320, 8, problems=4, group=8, tokens=48),
    "128 wide, 8 layers, 12 x 16 answers": Case(128, 8, problems=12, group=16, tokens=64),
}


def run(settings: Sequence[str], steps: int, folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of the steps of a run."""
    command = [sys.executable, "-c", TRAIN, str(ROOT / "train.py"), "--preset", "nano", *settings]
    alone = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    arguments = [f"run.steps={steps}", f"run.dir={folder}"]
    subprocess.run([*command, *arguments], env=os.environ | alone, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return read_run(folder).metrics


def duration_of(config: Config) -> Duration:
    planner = Planner(shape_of(config.model.name), config, 1, 0)
    return Duration(planner, CPU, config.rollout.max_new_tokens)


def measure(steps: int, rounds: int, cases: Sequence[str]) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        settings = {name: CASES[name].settings(folder) for name in cases}
        for number in range(rounds):
            for name in cases:
                first, *rest = run(settings[name], steps + 1, folder / f"{name}-{number}")
                found[name] = [*(found[name] or [first]), *rest]
        computed = {name: duration_of(resolve("nano", None, settings[name])) for name in cases}
    own = {name: measured(computed[name], records) for name, records in found.items()}
    ratio = own[CALIBRATION].ratio
    return {name: compared(own[name], replace(own[name], ratio=ratio)) for name in cases}


def compared(own: Duration, foretold: Duration) -> dict[str, Any]:
    seconds = {"measured": [own.rollout, own.update], "foretold": [foretold.rollout, foretold.update]}
    parts = {"rollout": foretold.rollout / own.rollout, "update": foretold.update / own.update}
    parts["step"] = (foretold.rollout + foretold.update) / (own.rollout + own.update)
    return {"length": own.length, **seconds, "foretold/measured": parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of a run, the first not counted (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES], help="cases, the calibration among them")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    before = {"machine": describe(), "load_before": os.getloadavg()[0], "calibration": CALIBRATION}
    result = before | {"steps": options.steps, "rounds": options.rounds}
    result["cases"] = measure(options.steps, options.rounds, options.only)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    for name, case in result["cases"].items():
        print(f"{name}: " + ", ".join(f"{part} {share:.2f}" for part, share in case["foretold/measured"].items()))


if __name__ == "__main__":
    main()
