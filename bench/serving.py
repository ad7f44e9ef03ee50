"""vLLM against the local samplers in whole runs, on this machine:

    .venv-vllm/bin/python bench/serving.py                                               the embedded model
    .venv-vllm/bin/python bench/serving.py --smollm2 FOLDER --data GSM8K --steps 6       SmolLM2-135M on GSM8K

The environment is the one that `bash tests/run.sh vllm` makes, the folder that of `scripts/smollm2.py`. Each engine
makes the same few steps with one thread; the numbers are medians over them, without the first and the last.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from machine import describe
from trainer.config.request import Request
from trainer.config.resolve import resolve
from trainer.machine import quiet
from trainer.ranks import distributed
from trainer.run import assemble

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "vllm.json"
ENGINES = {
    "hf": ["rollout.engine=hf"],
    "decode": ["rollout.engine=decode"],
    "vllm_colocate": ["rollout.engine=vllm_colocate"],
    "vllm_server": ["rollout.engine=vllm_server", "rollout.vllm.start=true"],
    "vllm_server, ahead": ["rollout.engine=vllm_server", "rollout.vllm.start=true", "rollout.ahead=1"],
}
PHASES = ("problem", "rollout", "advantage", "batch", "step")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1"}
FIXED = ["run.threads=1", "eval.problems=0", "run.merge=false", "run.save_every=1000"]
SMALL = ["rollout.problems=4", "rollout.group_size=8", "rollout.max_new_tokens=32", "rollout.dead_groups=keep"]
SMALL += ["model.dtype=fp32", "prompt.max_tokens=256"]


def run(engine: str, steps: int, folder: Path, preset: str, more: list[str]) -> dict[str, float]:
    """One run, and what its metrics say of a step."""
    overrides = [*more, *FIXED, f"run.dir={folder}", f"run.steps={steps}", *ENGINES[engine]]
    began = time.perf_counter()
    command = [sys.executable, str(ROOT / "train.py"), "--preset", preset, *overrides]
    subprocess.run(command, env=os.environ | ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - began
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [one for one in map(json.loads, lines) if 1 < one["step"] < steps]
    config = resolve(preset, None, overrides).rollout
    tokens = [config.problems * config.group_size * one["length"] for one in metrics]
    seconds = [sum(one.get(f"time/{name}", 0.0) for name in PHASES) for one in metrics]
    rollouts = [one["time/rollout"] for one in metrics]
    return {
        "tokens_per_s": round(median(n / s for n, s in zip(tokens, rollouts, strict=True))),
        "rollout_s": round(median(rollouts), 3),
        "training_s": round(median(one.get("time/step", 0.0) for one in metrics), 3),
        "step_s": round(median(seconds), 3),
        "whole_run_s": round(whole, 1),
        "sampler_difference": median(one["sampler_difference"] for one in metrics if "sampler_difference" in one),
    }


def sync(folder: Path, preset: str, more: list[str], repetitions: int = 20) -> dict[str, float]:
    """Milliseconds from an update to a server that has it, and of these to write the adapter down."""
    overrides = [*more, *FIXED, f"run.dir={folder}", "run.steps=1", *ENGINES["vllm_server"]]
    run: Any = assemble.build(Request(resolve(preset, None, overrides), preset, ""))
    sampler, policy = run.rollouts.sampler, run.updater.policy
    took, writing = [], []
    try:
        list(sampler.sample(run.rollouts.prompts_of(0)[:1], run.rollouts.sampling_of(0)))
        for _ in range(repetitions):
            policy.engine.global_steps += 1
            began = time.perf_counter()
            sampler.sync()
            took.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            policy.write_model(folder / "written")
            writing.append(1e3 * (time.perf_counter() - began))
        size = sum(path.stat().st_size for path in sampler.published.path.iterdir())
    finally:
        run.rollouts.close()
        run.log.close()
    found = {"median_ms": median(took), "most_ms": max(took), "writing_ms": median(writing)}
    return {name: round(number, 1) for name, number in found.items()} | {"bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="the folder with the model; without it the embedded one")
    parser.add_argument("--data", type=Path, help="the folder with GSM8K")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file to write (default %(default)s)")
    options = parser.parse_args()
    quiet.quiet()
    os.environ |= ONE_THREAD
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = [f"model.name={options.smollm2}", f"task.data_dir={options.data}", *SMALL]
        name, preset, more = ("smollm2-135m", "8gb", model) if options.smollm2 else ("nano", "nano", [])
        found: dict[str, Any] = {"machine": describe(), "steps": options.steps, "runs": {}, "sync": {}}
        for engine in options.engines:
            found["runs"][engine] = run(engine, options.steps, scratch / engine.replace(", ", "-"), preset, more)
            print(engine, found["runs"][engine], flush=True)
        distributed.connect(timeout_s=600)
        if "vllm_server" in options.engines:
            found["sync"]["vllm_server"] = sync(scratch / "sync", preset, more)
            print("sync", found["sync"], flush=True)
        distributed.disconnect()
    stored = json.loads(options.out.read_text()) if options.out.exists() else {}
    options.out.write_text(json.dumps(stored | {name: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
