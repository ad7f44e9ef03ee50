"""vLLM against the local samplers in whole runs, on this machine:

    .venv-vllm/bin/python bench/vllm.py                   the embedded model
    .venv-vllm/bin/python bench/vllm.py --model smollm2   the shape of SmolLM2-135M, random weights

The environment is the one that `bash tests/run.sh vllm` makes. Each engine makes the same few steps; the numbers are
medians over them, without the first two.
"""

from __future__ import annotations

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
from trainer import assemble, distributed, quiet
from trainer.settings import Request, resolve

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
SMALL = ["rollout.problems=4", "rollout.group_size=8", "rollout.max_new_tokens=16", "lora.targets=attention"]


def smollm2(folder: Path) -> list[str]:
    """Random weights in the shape of SmolLM2-135M, with the embedded tokenizer."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    shape |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=2, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "trainer/nano").save_pretrained(folder)
    return [f"model.name={folder}", *SMALL]


def run(engine: str, steps: int, folder: Path, more: list[str]) -> dict[str, float]:
    """One run, and what its metrics say of a step."""
    fixed = [f"run.dir={folder}", f"run.steps={steps}", "eval.problems=0", "run.merge=false", "run.save_every=1000"]
    learns = ["reward.weights={repetition: 1.0}", "reward.repetition_words=1"] if more else []
    command = [sys.executable, str(ROOT / "train.py"), "--preset", "nano", *more, *fixed, *learns, *ENGINES[engine]]
    began = time.perf_counter()
    subprocess.run(command, env=os.environ | ONE_THREAD, check=True, stdout=subprocess.DEVNULL)
    whole = time.perf_counter() - began
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][2:-1]
    config = resolve("nano", None, more).rollout
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


def sync(engine: str, folder: Path, more: list[str], repetitions: int = 20) -> dict[str, float]:
    """Milliseconds from an update to an engine that has it."""
    overrides = [*more, f"run.dir={folder}", "run.steps=1", "eval.problems=0", *ENGINES[engine]]
    parts = assemble.build(Request(resolve("nano", None, overrides), "nano", ""))
    took = []
    try:
        list(parts.sampler.sample(parts.prompts_of(0)[:1], parts.sampling_of(0)))
        for _ in range(repetitions):
            parts.policy.engine.global_steps += 1
            began = time.perf_counter()
            parts.sampler.sync()
            took.append(1e3 * (time.perf_counter() - began))
        size = sum(path.stat().st_size for path in parts.sampler.adapter.path.iterdir())
    finally:
        parts.close()
    return {"median_ms": round(median(took), 1), "most_ms": round(max(took), 1), "bytes": size}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["nano", "smollm2"], default="nano")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    options = parser.parse_args()
    quiet.quiet()
    os.environ |= ONE_THREAD
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        more = smollm2(scratch / "model") if options.model == "smollm2" else []
        found: dict[str, Any] = {"machine": describe(), "steps": options.steps, "runs": {}, "sync": {}}
        for engine in options.engines:
            found["runs"][engine] = run(engine, options.steps, scratch / engine.replace(", ", "-"), more)
            print(engine, found["runs"][engine], flush=True)
        distributed.connect(timeout_s=600)
        if "vllm_server" in options.engines:
            found["sync"]["vllm_server"] = sync("vllm_server", scratch / "sync", more)
            print("sync", found["sync"], flush=True)
        distributed.disconnect()
    stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps(stored | {options.model: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
